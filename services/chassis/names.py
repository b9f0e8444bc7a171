"""What are span attributes, metadata keys and NATS subjects called?

GenAI names follow the OpenTelemetry GenAI conventions (in development there); they live here so that a change upstream
is a change of this file.
"""

GEN_AI_OPERATION_NAME = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K = "gen_ai.request.top_k"
GEN_AI_REQUEST_SEED = "gen_ai.request.seed"
GEN_AI_REQUEST_STREAM = "gen_ai.request.stream"
GEN_AI_REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
GEN_AI_USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"
PROVIDER = "fathom"

ERROR_TYPE = "error.type"
SERVER_ADDRESS = "server.address"
HTTP_REQUEST_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_RESPONSE_STATUS_CODE = "http.response.status_code"
RPC_SYSTEM_NAME = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_RESPONSE_STATUS_CODE = "rpc.response.status_code"
MESSAGING_SYSTEM = "messaging.system"
MESSAGING_DESTINATION_NAME = "messaging.destination.name"

# Our own.
REQUEST_ID = "fathom.request_id"
SHOWN_ID = "fathom.shown_id"
REPLICA = "fathom.replica"
BLOCKS = "fathom.num_blocks"
IMAGES = "fathom.num_images"
BATCH_SEQUENCES = "fathom.batch.num_sequences"
CHUNK_TOKENS = "fathom.chunk_tokens"
KV_TOKENS = "fathom.kv_tokens"
MEMORY_TOKENS = "fathom.memory_tokens"
HANDOFF_BACKEND = "fathom.handoff.backend"
HANDOFF_BYTES = "fathom.handoff.num_bytes"

# gRPC metadata and NATS headers.
TRACEPARENT = "traceparent"
REQUEST_ID_METADATA = "fathom-request-id"

# NATS.
REPLICA_BUCKET = "fathom_replicas"
LOAD_SUBJECT = "fathom.load.{service}.{replica}"
