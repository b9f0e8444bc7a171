"""What do the wire's sampling parameters mean to the engine?"""

from __future__ import annotations

from kernels.batch import SamplingParams
from proto.common_pb2 import SamplingParams as SamplingMessage


def sampling_params(message: SamplingMessage) -> SamplingParams:
    """Translate. The recipe has validated the ranges."""
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=tuple((b.token_id, b.bias) for b in message.logit_bias),
        seed=message.seed,
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
    )


def has_penalties(sampling: SamplingParams) -> bool:
    """Say whether the engine needs all tokens so far to sample the next."""
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)
