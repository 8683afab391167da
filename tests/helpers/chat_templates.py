"""Chat templates of models, and in the manner of models."""

from helpers.paths import GOLDEN

# In the manner of Llama 3: a header around each role, a pinned date, texts trimmed.
LLAMA = """\
{{- '<|begin|>' -}}
{%- for message in messages -%}
{{- '<|header|>' + message['role'] + '<|/header|>\n\n' -}}
{%- if message['role'] == 'system' -%}{{- 'Today Date: 26 Jul 2024\n\n' -}}{%- endif -%}
{{- message['content'] | trim + '<|eot|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|header|>assistant<|/header|>\n\n' -}}
{%- endif -%}
"""
# In the manner of Llama 3.1 and 3.2: the day's date, unless another is given.
DATED = """\
{{- bos_token -}}
{%- if date_string is not defined -%}
{%- if strftime_now is defined -%}{%- set date_string = strftime_now('%d %b %Y') -%}
{%- else -%}{%- set date_string = '26 Jul 2024' -%}{%- endif -%}
{%- endif -%}
{%- if messages[0]['role'] == 'system' -%}
{%- set system, rest = messages[0]['content'] | trim, messages[1:] -%}
{%- else -%}{%- set system, rest = '', messages -%}{%- endif -%}
{{- '<|header|>system<|/header|>\n\nToday is ' + date_string + '.\n\n' -}}
{{- system + '<|eot|>' -}}
{%- for message in rest -%}
{{- '<|header|>' + message['role'] + '<|/header|>\n\n' -}}
{{- message['content'] | trim + '<|eot|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|header|>assistant<|/header|>\n\n' -}}
{%- endif -%}
"""
# In the manner of Qwen2.5: another system prompt where none is given, and tools.
QWEN2 = """\
{%- if messages[0]['role'] == 'system' -%}
{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' -}}
{%- else -%}{{- '<|im_start|>system\nYou are helpful.<|im_end|>\n' -}}{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first)
    or (message.role == 'assistant' and not message.tool_calls) -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
# As they came with SmolLM2 and Qwen3, both under the Apache License 2.0.
SMOLLM2 = (GOLDEN / "smollm2.jinja").read_text()
QWEN3 = (GOLDEN / "qwen3.jinja").read_text()
CHAT_ML = {"smollm2": SMOLLM2, "qwen2": QWEN2, "qwen3": QWEN3}
# In the manner of Zephyr: plain role names, an end of sentence after each message.
ZEPHYR = """\
{% for message in messages %}
{{ '<' + message['role'] + '>\n' + message['content'] + eos_token }}
  {% endfor %}
{%- if add_generation_prompt -%}{{- '<assistant>\n' -}}{%- endif -%}
"""
