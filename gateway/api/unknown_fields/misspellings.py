"""Whether an unknown field is a slip of the pen: nearly a known name. A slip is refused, because
ignoring it would drop something that the client wants. A field that other servers know is not a
slip, however close it is to one of Baton's names.
"""

from __future__ import annotations

from collections.abc import Iterable

SHORT, LONG = 4, 6
"""In known names from these lengths on, one edit, or two edits, count as a slip."""

KNOWN_ELSEWHERE = frozenset(
    """
    adapter_id allowed_callers alternatives api_base api_key api_version args assistant_id
    backend base_url betas cache cache_prompt caching citations client client_id client_metadata
    connector_id connectors context context_window conversation_id custom_id data debug decoding
    deployment details dimensions do_sample domain dry_allowed_length dry_base dry_multiplier
    dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range ebnf effort enable
    encoding encoding_format engine eos_token_id epsilon_cutoff error eta_cutoff examples
    exclude_reasoning expires_after extra extra_args extra_body extra_headers extra_query fallbacks
    file_id files filters force_json format fps frequency function_type functions_strict
    generation_config grammar grammar_lazy grammar_triggers greedy_sampling group guardrails
    guided_decoding_backend guided_whitespace_pattern hide_input hide_output id id_slot ids image
    image_url images include_thoughts index info inputs input_audio input_ids input_type item_id
    items json_mode json_object json_schema keep_alive key keys kind kv_transfer_params label
    labels lang language length_norm level limit llm locale logits_processors logit_bias_exp lora
    lora_name lora_path lora_request max_completion max_input_tokens max_length max_new_tokens
    max_prompt_tokens max_reasoning_tokens max_retries max_thinking_tokens max_time media meta
    method min_a min_length min_new_tokens min_keep min_output_tokens mirostat mirostat_eta
    mirostat_mode mirostat_tau mm_processor_kwargs modality mode model_config model_id model_name
    model_version models n_keep n_predict n_probs name names no_repeat_ngram_size no_stop_trim
    notes num_beams num_completions num_ctx num_keep num_predict num_return_sequences object
    organization origin originator output output_config output_format output_hidden_states
    output_schema output_tokens owner pad_token_id parameters params parent_id partial
    penalize_nl penalty penalty_alpha penalties plugins post_sampling_probs preset priority_class
    problem project project_id prompt_embeds prompt_id prompt_ids prompt_template prompt_tokens
    prompt_truncate_len prompt_type prompts provider provider_options providers quantization query
    questions random_seed raw reasoning reasoning_budget reasoning_details reasoning_format
    reasoning_history reasoning_max_tokens reasoning_split reasoning_summary regex region
    repeat_last_n repeat_penalty repetition_context_size require_parameters response response_fields
    response_mime_type response_schema result results return_cached_tokens_details
    return_dict return_details return_full_text return_hidden_states return_logprob
    return_meta_info return_progress return_prompt return_text_in_logprobs return_tokens rid role
    roles route router routing safe_mode safe_prompt safety_settings samplers sampling_params
    sampling_seed scenario schema score scores seed_id seeds_list separate_reasoning session
    session_id session_params signature size skip_reasoning smooth_factor smoothing_factor source
    spaces_between_special_tokens speed spec state status stop_regex stop_sequence stop_sequences
    stop_str stop_token stop_words stop_words_ids stopping_criteria store_id stream_format
    stream_interval stream_reasoning stream_tokens strict style system system_fingerprint
    system_instruction system_prompt tag tags task task_type temp template template_kwargs
    tenant tenant_id text texts tfs tfs_z think thinking thinking_blocks thinking_budget
    thinking_config thoughts thread_id time_to_live timeout timings_per_token title token
    token_healing token_ids tokens tool tool_config tool_id tool_name tool_resources toolset top_a
    top_n top_n_tokens top_n_sigma total_tokens trace trace_id transform transforms truncate
    trunc ttl turn typ_p type typical typical_p url usage use_cache use_raw_prompt user_data
    user_id user_location user_metadata user_name uuid value values vendor verbose verbosity
    version vllm_xargs voice watermark web_search weight weights xtc_probability xtc_threshold
    """.split()  # noqa: SIM905 - three hundred names read better this way
)
"""Names of fields that OpenAI, Anthropic, Google, Mistral, vLLM, SGLang, TGI, llama.cpp, Ollama,
OpenRouter and LiteLLM, or clients of theirs, are known to send."""


def meant_field(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is a slip of, if it is one."""
    if name in KNOWN_ELSEWHERE:
        return None
    for each in known:
        edits = (len(each) >= SHORT) + (len(each) >= LONG)
        if edits and _is_within(name, each, edits):
            return each
    return None


def _is_within(first: str, second: str, edits: int) -> bool:
    """Whether at most `edits` insertions, deletions and replacements turn `first` into `second`."""
    if abs(len(first) - len(second)) > edits:
        return False
    place, shorter = 0, min(len(first), len(second))
    while place < shorter and first[place] == second[place]:
        place += 1
    first, second = first[place:], second[place:]
    if not first or not second:
        return True  # the rest is at most `edits` long
    if not edits:
        return False
    return (
        _is_within(first[1:], second[1:], edits - 1)
        or _is_within(first[1:], second, edits - 1)
        or _is_within(first, second[1:], edits - 1)
    )
