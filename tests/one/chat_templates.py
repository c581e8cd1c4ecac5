"""Chat templates that write what ten families of models read, each with a place for the marks of what is learned.

`<<` and `>>` stand for `{% generation %}` and `{% endgeneration %}` where marks are wanted, and for nothing elsewhere.
"""
# ruff: noqa: E501

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A family's template; `special`: its special tokens, of which `bos` and `eos` have names. `tools`: whether it writes calls."""

    template: str
    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    system: bool = True
    tools: bool = False

    def plain(self) -> str:
        return self.template.replace("<<", "").replace(">>", "")

    def marked(self) -> str:
        return self.template.replace("<<", "{% generation %}").replace(">>", "{% endgeneration %}")


_CHATML = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}<<{{ m.content + '<|im_end|>' }}>>{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_QWEN = """\
{%- if tools %}
{{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') + '# Tools\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}<<{{ m.content }}
{%- for call in m.tool_calls or [] %}{% set f = call.function or call %}
{{- ('\\n' if m.content or not loop.first else '') + '<tool_call>\\n{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>' }}>>{{ '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}{% if m.role == 'assistant' %}<<{{ (m.content | trim) + '<|eot_id|>' }}>>{% else %}{{ (m.content | trim) + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

_MISTRAL = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content + '\\n\\n' %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{{- bos_token }}
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user and assistant') }}{% endif %}
{%- if m.role == 'user' %}{{ '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}
{%- else %}<<{{ ' ' + (m.content | trim) + eos_token }}>>{% endif %}
{%- endfor %}"""

_GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}{% if m.role == 'assistant' %}<<{{ (m.content | trim) + '<end_of_turn>' }}>>{% else %}{{ (m.content | trim) + '<end_of_turn>' }}{% endif %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

_PHI3 = """\
{%- for m in messages %}
{{- '<|' + m.role + '|>\\n' }}{% if m.role == 'assistant' %}<<{{ m.content + '<|end|>' }}>>{% else %}{{ m.content + '<|end|>' }}{% endif %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

_PHI4 = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '<|im_sep|>' }}{% if m.role == 'assistant' %}<<{{ m.content + '<|im_end|>' }}>>{% else %}{{ m.content + '<|im_end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""

_OLMO = """\
{{- bos_token }}
{%- for m in messages %}
{{- '<|' + m.role + '|>\\n' }}{% if m.role == 'assistant' %}<<{{ m.content + eos_token }}>>{% else %}{{ m.content }}{% endif %}{{ '\\n' if not loop.last else '' }}
{%- if loop.last and add_generation_prompt %}{{ '\\n<|assistant|>\\n' }}{% endif %}
{%- endfor %}"""

_GRANITE = """\
{%- if messages[0].role != 'system' %}{{ '<|start_of_role|>system<|end_of_role|>You are Granite.<|end_of_text|>\\n' }}{% endif %}
{%- for m in messages %}
{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' }}{% if m.role == 'assistant' %}<<{{ m.content + '<|end_of_text|>' }}>>{% else %}{{ m.content + '<|end_of_text|>' }}{% endif %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""

_SMOLLM3 = """\
{{- '<|im_start|>system\\n## Metadata\\n\\n' + (messages[0].content if messages[0].role == 'system' else 'You are helpful.') + '<|im_end|>\\n' }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}<<{{ (m.content | trim) + '<|im_end|>' }}>>{{ '\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FAMILIES = {
    "chatml": Family(_CHATML, _IM, "<|im_end|>"),
    "qwen": Family(_QWEN, _IM, "<|im_end|>", tools=True),
    "llama3": Family(
        _LLAMA3, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eos|>"), "<|eos|>", "<|begin_of_text|>"
    ),
    "mistral": Family(_MISTRAL, ("<s>", "</s>"), "</s>", "<s>"),
    "gemma": Family(_GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<bos>", system=False),
    "phi3": Family(_PHI3, ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"), "<|endoftext|>"),
    "phi4": Family(_PHI4, (*_IM, "<|im_sep|>"), "<|im_end|>"),
    "olmo": Family(_OLMO, ("<|endoftext|>",), "<|endoftext|>", "<|endoftext|>"),
    "granite": Family(_GRANITE, ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"), "<|end_of_text|>"),
    "smollm3": Family(_SMOLLM3, _IM, "<|im_end|>"),
}

THINKING = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + ('<think>\\n\\n</think>\\n\\n' if m.role == 'assistant' and loop.last else '') + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""  # drops earlier thoughts, as Qwen 3 does
