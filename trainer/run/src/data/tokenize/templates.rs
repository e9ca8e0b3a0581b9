//! Chat templates that a run can name. They have the format of the family, and add no system message of their own.

use std::collections::BTreeSet;
use std::path::Path;

/// Puts a system message before the words of the first question, for families that have no role for it. Each
/// family adds how a question and an answer are written.
macro_rules! with_system {
    ($between:literal, $begins:literal, $question:literal, $answer:literal, $ends:literal) => {
        concat!(
            $begins,
            "{% set named = namespace(system='') %}",
            "{% for message in messages %}",
            "{% if message.role == 'system' %}{% set named.system = named.system + message.content + '",
            $between,
            "' %}",
            "{% elif message.role == 'assistant' %}",
            $answer,
            "{% else %}{% set said = named.system + message.content | trim %}{% set named.system = '' %}",
            $question,
            "{% endif %}{% endfor %}",
            $ends
        )
    };
}

const NAMED: [(&str, &str); 10] = [
    (
        "alpaca",
        with_system!(
            "\\n\\n",
            "",
            "{{ '### Instruction:\\n' + said + '\\n\\n### Response:\\n' }}",
            "{{ message.content + eos_token + '\\n\\n' }}",
            ""
        ),
    ),
    ("chatml", CHATML),
    (
        "gemma",
        with_system!(
            "\\n\\n",
            "{{ bos_token }}",
            "{{ '<start_of_turn>user\\n' + said + '<end_of_turn>\\n' }}",
            "{{ '<start_of_turn>model\\n' + message.content | trim + '<end_of_turn>\\n' }}",
            "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
        ),
    ),
    (
        "llama2",
        "{% set named = namespace(system='') %}{% for message in messages %}\
         {% if message.role == 'system' %}{% set named.system = '<<SYS>>\\n' + message.content + '\\n<</SYS>>\\n\\n' %}\
         {% elif message.role == 'assistant' %}{{ ' ' + message.content | trim + ' ' + eos_token }}\
         {% else %}{{ (bos_token or '') + '[INST] ' + named.system + message.content | trim + ' [/INST]' }}{% set named.system = '' %}\
         {% endif %}{% endfor %}",
    ),
    (
        "llama3",
        "{{ bos_token }}{% for message in messages %}\
         {{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}\
         {% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    ),
    (
        "mistral",
        with_system!(
            "\\n\\n",
            "{{ bos_token }}",
            "{{ '[INST] ' + said + '[/INST]' }}",
            "{{ ' ' + message.content | trim + eos_token }}",
            ""
        ),
    ),
    (
        "phi3",
        "{% for message in messages %}{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}{% endfor %}\
         {% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
    ),
    ("qwen", CHATML),
    (
        "vicuna",
        with_system!(
            " ",
            "{{ bos_token }}",
            "{{ 'USER: ' + said + ' ASSISTANT:' }}",
            "{{ ' ' + message.content | trim + eos_token }}",
            ""
        ),
    ),
    (
        "zephyr",
        "{% for message in messages %}{{ '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' }}{% endfor %}\
         {% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
    ),
];

const CHATML: &str = "{% for message in messages %}\
     {{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}\
     {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// Returns the template with this name.
pub(super) fn named(name: &Path) -> Option<&'static str> {
    let found = NAMED.iter().find(|(known, _)| name == Path::new(known));
    found.map(|(_, template)| *template)
}

/// Lists the tokens between angle brackets in a conversation, each once.
pub(super) fn tokens(conversation: &str) -> BTreeSet<String> {
    let begins = conversation.match_indices('<').map(|(at, _)| at);
    // Llama 2 has <<SYS>>, which is no token.
    let alone = begins.filter(|&at| !conversation[..at].ends_with('<'));
    let tokens = alone.filter_map(|at| {
        let (inner, _) = conversation[at + 1..].split_once('>')?;
        let is_word = !inner.contains(|part: char| part == '<' || part.is_whitespace());
        is_word.then(|| format!("<{inner}>"))
    });
    tokens.collect()
}

/// Lists the names of all templates.
pub(super) fn names() -> String {
    NAMED.map(|(name, _)| name).join(", ")
}

#[cfg(test)]
mod tests {
    use chat_template::Value;

    use super::super::chat::Template;
    use super::super::special::Special;
    use super::*;
    use crate::data::read::Chat;

    /// Compares with the formats of the families' own models, written by hand.
    #[test]
    fn a_named_template_has_the_format_of_its_family() {
        let special = |tokens: &[(&str, &str)]| {
            let mut special = Special::default();
            for (name, token) in tokens {
                special.tokens.insert((*name).into(), (*token).into());
            }
            special
        };
        let end = ("eos_token", "</s>");
        let without = special(&[end]);
        let special = special(&[("bos_token", "<s>"), end]);
        let turns = [
            ("system", "be brief"),
            ("user", "why?"),
            ("assistant", "so"),
            ("user", "ok?"),
            ("assistant", "yes"),
        ];
        let messages: Vec<Value> = (turns.iter())
            .map(|&(role, content)| {
                Value::from_pairs([("role", role.into()), ("content", content.into())])
            })
            .collect();
        let chatml = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\nso<|im_end|>\n<|im_start|>user\nok?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n";
        for (name, text, said) in [
            (
                "alpaca",
                "### Instruction:\nbe brief\n\nwhy?\n\n### Response:\nso</s>\n\n### Instruction:\nok?\n\n### Response:\nyes</s>\n\n",
                ["so</s>\n\n", "yes</s>\n\n"],
            ),
            ("chatml", chatml, ["so<|im_end|>\n", "yes<|im_end|>\n"]),
            (
                "gemma",
                "<s><start_of_turn>user\nbe brief\n\nwhy?<end_of_turn>\n<start_of_turn>model\nso<end_of_turn>\n<start_of_turn>user\nok?<end_of_turn>\n<start_of_turn>model\nyes<end_of_turn>\n",
                ["so<end_of_turn>\n", "yes<end_of_turn>\n"],
            ),
            (
                "llama2",
                "<s>[INST] <<SYS>>\nbe brief\n<</SYS>>\n\nwhy? [/INST] so </s><s>[INST] ok? [/INST] yes </s>",
                [" so </s>", " yes </s>"],
            ),
            (
                "llama3",
                "<s><|start_header_id|>system<|end_header_id|>\n\nbe brief<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nwhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nso<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nok?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nyes<|eot_id|>",
                ["so<|eot_id|>", "yes<|eot_id|>"],
            ),
            (
                "mistral",
                "<s>[INST] be brief\n\nwhy?[/INST] so</s>[INST] ok?[/INST] yes</s>",
                [" so</s>", " yes</s>"],
            ),
            (
                "phi3",
                "<|system|>\nbe brief<|end|>\n<|user|>\nwhy?<|end|>\n<|assistant|>\nso<|end|>\n<|user|>\nok?<|end|>\n<|assistant|>\nyes<|end|>\n",
                ["so<|end|>\n", "yes<|end|>\n"],
            ),
            ("qwen", chatml, ["so<|im_end|>\n", "yes<|im_end|>\n"]),
            (
                "vicuna",
                "<s>USER: be brief why? ASSISTANT: so</s>USER: ok? ASSISTANT: yes</s>",
                [" so</s>", " yes</s>"],
            ),
            (
                "zephyr",
                "<|system|>\nbe brief</s>\n<|user|>\nwhy?</s>\n<|assistant|>\nso</s>\n<|user|>\nok?</s>\n<|assistant|>\nyes</s>\n",
                ["so</s>\n", "yes</s>\n"],
            ),
        ] {
            let template = Template::new(named(Path::new(name)).unwrap(), None, &special).unwrap();
            let conversation = Chat {
                counts: vec![true; messages.len()],
                messages: messages.clone(),
                tools: None,
            };
            let chat = template.texts_counted(&conversation).unwrap().remove(0);
            assert_eq!(chat.text, text, "{name}");
            let counted = chat.counted.unwrap();
            let found: Vec<&str> = counted
                .iter()
                .map(|range| &chat.text[range.clone()])
                .collect();
            assert_eq!(found, said, "{name}");
            // A tokenizer may have no token that begins a text.
            let template = Template::new(named(Path::new(name)).unwrap(), None, &without).unwrap();
            let chat = template.texts_counted(&conversation).unwrap().remove(0);
            assert_eq!(chat.text, text.replace("<s>", ""), "{name}");
        }
        let found = tokens("<|im_start|>user\n<<SYS>>\n1 < 2 > 0<|im_end|>\n");
        assert_eq!(Vec::from_iter(found), ["<|im_end|>", "<|im_start|>"]);
        assert_eq!(NAMED.len(), 10, "each is in the test");
        assert!(named(Path::new("chatml.jinja")).is_none());
    }
}
