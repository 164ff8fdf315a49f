"""Chat templates like those of published models, without tools: the same structure, checks of roles
and contents, and handling of whitespace. TEMPLATES is {name: (Jinja, special tokens, the variables
that transformers passes to it, tokens outside of the vocabulary that are not special)}."""

LLAMA3 = ("""{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' """
          """+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""", ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
          dict(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"), [])

QWEN2 = ("""{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) """
         """or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "tool" %}
        {{- message | tojson }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], dict(eos_token="<|im_end|>"),
         ["<tool_call>", "</tool_call>"])

QWEN3 = ("""{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string """
         """and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n')"""
         """.split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + """
         """'\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}""", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], dict(eos_token="<|im_end|>"),
         ["<think>", "</think>"])

GEMMA3 = ("""{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '

' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '

' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '
' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
""", ["<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
          dict(bos_token="<bos>", eos_token="<eos>"), [])

SMOLLM2 = ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
           "{{ '<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n' }}{% endif %}"
           "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
           "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
           ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
           dict(bos_token="<|im_start|>", eos_token="<|im_end|>"), [])

SMOLLM3 = ("""{# ───── header ───── #}
{%- set system_message = messages[0].content if messages[0].role == "system" else "" -%}
{%- set mode = "/no_think" if "/no_think" in system_message else "/think" -%}
{{- "<|im_start|>system\\n" -}}
{{- "## Metadata\\n\\nKnowledge Cutoff Date: June 2025\\nReasoning Mode: " + mode + "\\n\\n" -}}
{{- system_message.replace("/no_think", "").replace("/think", "").rstrip() + "<|im_end|>\\n" -}}
{# ───── main loop ───── #}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}
        {{ "<|im_start|>user\\n" + content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {%- if mode == "/think" -%}
            {{ "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- else -%}
            {{ "<|im_start|>assistant\\n<think>\\n\\n</think>\\n" + content + "<|im_end|>\\n" }}
        {%- endif -%}
        {% endgeneration %}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {%- if mode == "/think" -%}
        {{ "<|im_start|>assistant\\n" }}
    {%- else -%}
        {{ "<|im_start|>assistant\\n" + "<think>\\n\\n</think>\\n" }}
    {%- endif -%}
{%- endif -%}
""", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], dict(eos_token="<|im_end|>"),
           ["<think>", "</think>"])

MISTRAL = ("""{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- for message in loop_messages | rejectattr("role", "equalto", "tool") %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("After the optional system message, roles must alternate") }}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- endif %}
{%- endfor %}
""", ["<s>", "</s>", "[INST]", "[/INST]"], dict(bos_token="<s>", eos_token="</s>"), [])

OLMO2 = ("{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
         "{{ '<|system|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'user' %}"
         "{{ '<|user|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'assistant' %}"
         "{% if not loop.last %}{{ '<|assistant|>\n' + message['content'] + eos_token + '\n' }}"
         "{% else %}{{ '<|assistant|>\n' + message['content'] + eos_token }}{% endif %}{% endif %}"
         "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
         "{% endfor %}", ["<|endoftext|>"],
         dict(bos_token="<|endoftext|>", eos_token="<|endoftext|>"), [])

CHATML = ("""{% for message in messages %}
    {% if message['content'] is defined %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
    {% endif %}
{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}""", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
          dict(eos_token="<|endoftext|>"), [])  # a base model: its files name the document's end

ZEPHYR = ("""{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""", ["<s>", "</s>"], dict(bos_token="<s>", eos_token="</s>"), [])

TEMPLATES = dict(llama3=LLAMA3, qwen2=QWEN2, qwen3=QWEN3, gemma3=GEMMA3, smollm2=SMOLLM2,
                 smollm3=SMOLLM3, mistral=MISTRAL, olmo2=OLMO2, chatml=CHATML, zephyr=ZEPHYR)


def turns(*texts, system=None):
    """Return a conversation [(role, text), ...]: the system message, if any, then `texts` as user
    and assistant messages in turn."""
    return [("system", system)] * (system is not None) + [
        ("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(texts)]


CONVERSATIONS = [
    turns("Hello", "Hi there!"),
    turns("What is 2 + 2?", "4", "And 3 + 3?", "6, of course."),
    turns("Say it.", "It.", system="Be brief."),
    turns("a", "b", "c", "d", "e", "f", system="You are a pirate. /no_think"),
    turns("Write code:\n\n```python\ndef f(x):\n    return x\n```", "Done.\n\n    indented"),
    turns("é ü 日本語 \U0001f600", "\U0001f98a naïve — “quotes”"),
    turns("two  blanks\tand tabs", "many\n\n\nlines"),
    turns("Why?", "<think>\nHm, 42.\n</think>\n\nBecause.", "Really?", "Yes."),
    turns("{{ 7 * 7 }} {% raw %} & <b>", "\"quoted\" 'single' \\n \\\\"),
    turns("don't I'll we've 1234567", "   leading and trailing   ", "?", "!")]

LONG = "Recite: one, two, three; é, 日本, \U0001f600."
ANSWERED = [  # whose answers are found again in a chat's text, to compare the masks of training
    turns("Hello", "Hi there!"),
    turns("Hello", "Hello"),
    turns("a", "a", "a", "a", "b", "a", system="a"),
    turns(LONG, LONG, LONG, "  " + LONG + "  ", system="Repeat after me."),
    turns("Say nothing.", ""),
    turns("Say nothing.", "", "Again.", "", "And now?", "Now?", system=""),
    turns("é ü 日本語 \U0001f600", "\U0001f98a naïve — “quotes”", "\u0301", "e\u0301\u200b\ufffd"),
    turns("assistant\n", "user\nassistant\n\nsystem", "model\n", "### Assistant:\nmodel"),
    turns("Write code.", "```python\ndef f(x):\n\n    return x  # 42\n```\n\n", "Thx\n", "1\n2\n"),
    turns(*"abcdefgh", system="One letter each.\n\nNo more.")]
