"""Built-in chat templates for --chat-template NAME, under llama.cpp's names."""

from __future__ import annotations

from vkbackend.models.text.chat_template import CHATML

_ROLES = """\
{%%- for message in messages -%%}
{{- %s -}}
{%%- endfor -%%}
{%%- if add_generation_prompt -%%}
{{- %s -}}
{%%- endif -%%}
"""
_HEADER = "'<|start_header_id|>%s<|end_header_id|>\\n\\n'"
_GEMMA = """\
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- set ns.system = ns.system + (message.content | trim) -%}
{%- else -%}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
{%- if ns.system and message.role != 'assistant' -%}
{{- ns.system + '\\n\\n' -}}
{%- set ns.system = '' -%}
{%- endif -%}
{{- (message.content | trim) + '<end_of_turn>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""
TEMPLATES = {
    "chatml": CHATML,
    "gemma": _GEMMA,
    "llama3": _ROLES
    % (
        "'<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + (message.content | trim) "
        "+ '<|eot_id|>'",
        _HEADER % "assistant",
    ),
    "phi3": _ROLES % ("'<|' + message.role + '|>\\n' + message.content + '<|end|>\\n'", "'<|assistant|>\\n'"),
    "phi4": _ROLES
    % (
        "'<|im_start|>' + message.role + '<|im_sep|>' + message.content + '<|im_end|>'",
        "'<|im_start|>assistant<|im_sep|>'",
    ),
    "zephyr": _ROLES
    % ("'<|' + message.role + '|>\\n' + message.content + '<|endoftext|>\\n'", "'<|assistant|>\\n'"),
}
