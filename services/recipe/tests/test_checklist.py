"""Which test holds which case of the API checklist? One table, and a test that no case is without.

Endpoints: C is /v1/chat/completions, R /v1/responses, M /v1/messages. Unless a file is named, it is one of this folder;
e2e/ is with all services and a real model.
"""

import ast
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.chassis import errors
from services.recipe.tests.running import Running
from services.recipe.tests.scripted import Step
from services.recipe.tests.speaking import answering, ids_of

ROOT = Path(__file__).parents[3]
CASES: dict[str, tuple[str, ...]] = {
    "1 C basic": ("test_checklist_chat::test_basic",),
    "2 C stream": ("test_checklist_chat::test_stream",),
    "3 C no usage by default": ("test_checklist_chat::test_stream",),
    "4 C include_usage": ("test_checklist_chat::test_stream_is_the_whole",),
    "5 C stream == non-stream": ("test_checklist_chat::test_stream_is_the_whole", "e2e/test_requests::test_chat_streams_the_text_it_returns_whole"),
    "6 C max_completion_tokens": ("test_checklist_chat::test_limits",),
    "7 C max_tokens": ("test_checklist_chat::test_limits", "test_checklist_chat::test_what_is_out_of_range"),
    "8 C max 0 / negative": ("test_checklist_chat::test_what_is_out_of_range",),
    "9 C over context": ("test_checklist_chat::test_what_is_out_of_range", "test_refusals::test_too_long_a_prompt_is_refused_before_any_work"),
    "10 C stop string": ("test_checklist_chat::test_stops", "test_transcript::test_chunks_do_not_matter"),
    "11 C stop list": ("test_checklist_chat::test_stops", "test_checklist_chat::test_what_is_out_of_range"),
    "12 C stop empty": ("test_checklist_chat::test_what_is_out_of_range",),
    "13 C stop inside a character": ("test_checklist_chat::test_stops",),
    "14 C n=2": ("test_checklist_chat::test_choices", "test_checklist_chat::test_a_long_prompt_is_computed_before_its_other_choices_ask"),
    "15 C n out of range": ("test_checklist_chat::test_what_is_out_of_range",),
    "16 C seed": ("test_checklist_chat::test_seeds",),
    "17 C temperature 0": ("test_checklist_chat::test_seeds", "e2e/test_same_tokens::test_chunked_prefill_gives_the_same_tokens"),
    "18 C temperature and top_p out of range": ("test_checklist_chat::test_what_is_out_of_range",),
    "19 C logprobs": ("test_checklist_chat::test_logprobs",),
    "20 C top_logprobs": ("test_checklist_chat::test_logprobs", "test_checklist_chat::test_what_is_out_of_range"),
    "21 C top_logprobs without logprobs": ("test_checklist_chat::test_what_is_out_of_range",),
    "22 C logprobs of emoji, streamed": ("test_checklist_chat::test_logprobs", "test_chat::test_logprobs_are_one_per_token_and_spell_the_text"),
    "23 C logit_bias": ("test_checklist_chat::test_bias_and_penalties",),
    "24 C logit_bias out of range": ("test_checklist_chat::test_what_is_out_of_range", "e2e/test_requests::test_the_suite_answers_after_all_that"),
    "25 C penalties": ("test_checklist_chat::test_bias_and_penalties", "test_checklist_chat::test_what_is_out_of_range"),
    "26 C json_object": ("test_checklist_structured::test_json_object",),
    "27 C json_schema": ("test_checklist_structured::test_parse", "e2e/test_structured::test_json_is_valid_every_time"),
    "28 C json_schema invalid": ("test_checklist_structured::test_invalid_schema",),
    "29 C keyword that cannot be enforced": ("test_checklist_structured::test_unsupported_keyword",),
    "30 C regex and grammar": ("test_checklist_structured::test_regex_and_grammar",),
    "31 C schema cut by length": ("test_checklist_structured::test_length",),
    "32 C tools": ("test_checklist_all::test_tool_calls",),
    "33 C tools, streamed": ("test_checklist_all::test_tool_calls", "test_deepseek_chat::test_the_sdk_puts_streamed_calls_together"),
    "34 C parallel tools": ("test_checklist_all::test_tool_calls",),
    "35 C parallel_tool_calls false": ("test_checklist_all::test_one_call_at_most", "test_checklist_structured::test_one_call_at_most"),
    "36 C tool_choice": ("test_checklist_structured::test_tool_choice", "e2e/test_structured::test_required_calls_are_parseable"),
    "37 C tool_choice that cannot be": ("test_checklist_chat::test_what_is_out_of_range",),
    "38 C tool result": ("test_checklist_all::test_results_of_tools",),
    "39 C orphan tool message": ("test_checklist_chat::test_what_is_out_of_range",),
    "40 C developer": ("test_checklist_chat::test_developer_and_parts",),
    "41 C content parts": ("test_checklist_chat::test_developer_and_parts",),
    "42 C content null": ("test_checklist_chat::test_what_is_out_of_range",),
    "43 C unknown role": ("test_checklist_chat::test_what_is_out_of_range",),
    "44 C reasoning_effort": ("test_checklist_all::test_effort",),
    "45 C reasoning usage": ("test_checklist_all::test_effort",),
    "46 C cached tokens": ("test_chat::test_usage_comes_last_and_alone_when_asked_for", "e2e/test_requests::test_cached_tokens_are_exact"),
    "47 C image data URI": ("test_deepseek_chat::test_pictures_fill_their_places",),
    "48 C bad image": ("test_deepseek_chat::test_what_is_refused",),
    "49 C image URL to private addresses": (
        "test_image_fetch::test_what_is_not_public_is_never_dialled",
        "test_image_fetch::test_redirects_are_followed_and_checked",
        "test_image_fetch::test_urls_are_read_strictly",
    ),
    "50 C image bomb": ("test_deepseek_chat::test_what_is_refused", "test_image_fetch::test_all_apis_take_urls"),
    "51 C smuggling": ("test_smuggling::test_no_text_brings_a_control_token", "test_smuggling::test_each_spelling_alone"),
    "52 C unknown model": ("test_checklist_chat::test_unknown_models_and_bad_bodies",),
    "53 C bad JSON": ("test_checklist_chat::test_unknown_models_and_bad_bodies", "test_refusals::test_what_is_no_json_object_is_refused"),
    "54 C depth": ("test_limits::TestJson::test_hostile_bodies_are_refused_at_once", "e2e/test_requests::test_malformed_bodies_are_refused"),
    "55 C body too large": ("test_limits::TestJson::test_hostile_bodies_are_refused_at_once", "test_refusals::test_too_large_a_body_is_refused"),
    "56 C authentication": ("test_keys_gate::TestWho::test_strangers_are_refused_in_their_protocols_words",),
    "57 C wrong method, wrong path": ("test_checklist_chat::test_unknown_models_and_bad_bodies", "test_refusals::test_other_paths_and_methods"),
    "58 C small errors": ("test_checklist_chat::test_unknown_models_and_bad_bodies", "test_refusals::test_error_bodies_stay_small"),
    "59 C overload": ("test_checklist::test_the_sdk_waits_out_an_overload", "test_refusals::test_errors_from_behind_keep_their_meaning"),
    "60 C disconnect, streamed": ("test_streams::TestShared::test_a_disconnect_cancels_a_stream", "e2e/test_requests::test_a_client_that_goes_away_leaves_nothing"),
    "61 C disconnect, whole": ("test_streams::TestShared::test_a_disconnect_cancels_a_whole_answer", "e2e/test_requests::test_a_client_that_goes_away_leaves_nothing"),
    "62 C long prefill": ("test_streams::test_silence_is_filled_with_comments",),
    "63 C engine dies": ("test_checklist_all::test_an_engine_that_dies", "e2e/test_faults::test_a_lost_replica_is_an_error_within_two_seconds"),
    "64 C headers": ("test_checklist_all::test_headers",),
    "65 C unknown field": ("test_checklist_chat::test_what_is_out_of_range", "test_checklist_chat::test_who_asks_changes_nothing"),
    "66 Completions": (
        "test_checklist_all::test_completions",
        "test_completions::test_echo_with_logprobs_scores_the_prompt",
        "test_fill_in::test_every_family_s_tokens",
        "e2e/test_apis::test_likelihoods_are_the_model_s",
    ),
    "67 Completions streamed": ("test_checklist_all::test_completions", "test_completions::test_streams_end_with_usage_when_asked"),
    "68 models": ("test_checklist_all::test_models_health_and_metrics", "test_checklist_messages::test_models"),
    "69 tokenize": ("test_checklist_all::test_tokenize",),
    "70 health and metrics": ("test_checklist_all::test_models_health_and_metrics", "test_checklist::test_metrics_are_not_public"),
    "71 R string input": ("test_checklist_responses::test_string_input",),
    "72 R stream order": ("test_checklist_responses::test_stream_order", "test_checklist_responses_state::test_retrieve_and_delete"),
    "73 R ids": ("test_checklist_responses::test_stream_order",),
    "74 R instructions": ("test_checklist_responses_state::test_previous_response",),
    "75 R previous_response_id": ("test_checklist_responses_state::test_previous_response",),
    "76 R store false": ("test_checklist_responses_state::test_what_is_not_stored",),
    "77 R retrieve, delete": ("test_checklist_responses_state::test_retrieve_and_delete",),
    "78 R input_items": ("test_checklist_responses_state::test_input_items",),
    "79 R background": (
        "test_checklist_responses_state::test_background",
        "test_checklist_responses_state::test_background_stream_and_resume",
        "test_checklist_responses_state::test_cancel",
        "test_response_store_served::test_any_replica_will_do",
    ),
    "80 R cancel of what is not in the background": ("test_checklist_responses_state::test_only_background_responses_are_cancelled",),
    "81 R conversation": ("test_checklist_responses_state::test_conversations",),
    "82 R function_call": ("test_checklist_responses::test_function_calls",),
    "83 R function_call_output": ("test_checklist_responses::test_results_round_trip",),
    "84 R tool_choice": ("test_checklist_responses::test_tool_choice", "test_checklist_formats::test_calls_that_must_come"),
    "85 R json_schema": ("test_checklist_formats::test_a_schema_in_all_apis",),
    "86 R reasoning": ("test_checklist_responses::test_reasoning",),
    "87 R logprobs": ("test_checklist_responses::test_logprobs",),
    "88 R max_output_tokens": ("test_checklist_responses::test_max_output_tokens",),
    "89 R truncation": ("test_checklist_responses::test_truncation",),
    "90 R failure": ("test_checklist_responses::test_failure", "test_checklist_responses_state::test_a_background_response_that_fails"),
    "91 R image and file": ("test_checklist_responses::test_images_and_files", "test_image_fetch::test_all_apis_take_urls"),
    "92 R usage": ("test_checklist_responses::test_usage_and_input_tokens",),
    "93 R unsupported tool": ("test_checklist_responses::test_what_is_refused",),
    "94 R input_tokens": ("test_checklist_responses::test_usage_and_input_tokens",),
    "95 M basic": ("test_checklist_messages::test_basic",),
    "96 M no max_tokens": ("test_checklist_messages::test_max_tokens_is_required",),
    "97 M stream": ("test_checklist_messages::test_stream",),
    "98 M ping": ("test_checklist_messages::test_ping",),
    "99 M stop_sequences": ("test_checklist_messages::test_stop_sequences",),
    "100 M max_tokens": ("test_checklist_messages::test_max_tokens",),
    "101 M tools": ("test_checklist_messages::test_tools",),
    "102 M tool_choice": ("test_checklist_messages::test_tool_choice", "test_checklist_formats::test_calls_that_must_come"),
    "103 M tool_result": ("test_checklist_messages::test_tool_results",),
    "104 M thinking": ("test_checklist_messages::test_thinking",),
    "105 M redacted_thinking": ("test_checklist_messages::test_redacted_thinking",),
    "106 M system, cache_control": ("test_checklist_messages::test_system_and_cache_control",),
    "107 M usage of the cache": ("test_checklist_messages::test_usage_and_count_tokens",),
    "108 M count_tokens": ("test_checklist_messages::test_usage_and_count_tokens",),
    "109 M json_schema": ("test_checklist_formats::test_a_schema_in_all_apis",),
    "110 M errors": (
        "test_checklist_messages::test_errors_from_behind",
        "test_checklist_messages::test_errors_of_requests",
        "test_keys_gate::TestWho::test_strangers_are_refused_in_their_protocols_words",
    ),
    "111 M error in mid-stream": ("test_checklist_messages::test_an_error_in_mid_stream",),
    "112 M headers": ("test_checklist_messages::test_headers", "test_keys_gate::TestWho::test_both_ways_to_send_a_key_work_everywhere"),
    "113 M a given beginning": ("test_checklist_messages::test_a_given_beginning_is_refused",),
    "114 all three": ("test_checklist_all::test_three_apis_one_conversation", "e2e/test_apis::test_three_apis_one_model"),
}  # fmt: skip


def names_in(file: Path) -> set[str]:
    """Names of a file's tests, with their class if they have one."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        functions = [each for each in inner if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        found |= {prefix + each.name for each in functions}
    return found


def test_every_case_has_its_tests() -> None:
    """All 114, and each named test is there."""
    assert list(range(1, 115)) == [int(case.split()[0]) for case in CASES]
    named = {name for names in CASES.values() for name in names}
    for file in {name.partition("::")[0] for name in named}:
        path = ROOT / f"{file}.py" if "/" in file else Path(__file__).with_name(f"{file}.py")
        assert {name.partition("::")[2] for name in named if name.partition("::")[0] == file} <= names_in(path), file


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_the_sdk_waits_out_an_overload(deep: Running) -> None:
    """Case 59: told when to come again, it does, and gets its answer."""
    full = errors.to_stream_error(errors.Overloaded("full", retry_after=0.5))
    deep.play(lambda _request: [Step(error=full)])
    patient = deep.sdk.with_options(max_retries=3)
    asked: dict[str, Any] = {"model": "deep", "messages": [{"role": "user", "content": "hello"}]}
    with pytest.raises(openai.RateLimitError):
        await deep.sdk.chat.completions.create(**asked)
    first = len(deep.entrypoint.submitted)

    def script(request: object) -> list[Step]:
        is_first = len(deep.entrypoint.submitted) == first + 1
        return [Step(error=full)] if is_first else [Step([*ids_of("</think>ok")], finish=2)]

    deep.entrypoint.script = script
    answer = await patient.chat.completions.create(**asked)

    assert ("ok", first + 2) == (answer.choices[0].message.content, len(deep.entrypoint.submitted))


@pytest.mark.asyncio(loop_scope="session")
async def test_metrics_are_not_public(deep: Running) -> None:
    """Case 70: they are on a port of their own, with what the public one served."""
    deep.play(answering("</think>ok"))
    await deep.post("/v1/chat/completions", {"model": "deep", "messages": [{"role": "user", "content": "hello"}]})
    async with httpx.AsyncClient(base_url=f"http://{deep.service.metrics_address}", timeout=30) as metrics:
        page = (await metrics.get("/metrics")).text

    assert 404 == (await deep.http.get("/metrics")).status_code
    assert "gen_ai_server_time_to_first_token_seconds" in page
    assert "fathom_recipe_" in page
