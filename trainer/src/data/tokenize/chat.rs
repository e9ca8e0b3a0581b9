//! Formats conversations with the tokenizer's template, and finds the assistant's part in the text.
//!
//! If a template marks that part (`{% generation %}`), the marks are used. For other templates, the
//! assistant's part of a turn is what the turn adds: the conversation before the turn with a generation
//! prompt must be a prefix of the conversation with the turn, and that a prefix of the whole. If the
//! assistant speaks first, its part begins after the template's generation prompt. Some templates leave out what
//! precedes the message (Qwen3's an empty block of reasoning) once other turns follow: then the whole message and what
//! follows it count. Templates that change the message itself once others follow (for example by dropping its
//! reasoning) are refused with the position of the message.

use std::ops::Range;

use minijinja::value::Value;
use minijinja::{Environment, context};

use super::dialect::{self, BEGINS, ENDS};
use super::special::Special;
use crate::data::read::Chat as Conversation;

/// A chat template.
pub(super) struct Template {
    environment: Environment<'static>,
    marks: bool,
    source: String,
    /// `bos_token` and other tokens that templates refer to.
    tokens: Value,
}

/// Conversation as text.
#[derive(Debug, PartialEq)]
pub(super) struct Chat {
    pub(super) text: String,
    /// Bytes that count in the loss; `None`: all.
    pub(super) counted: Option<Vec<Range<usize>>>,
}

impl Template {
    pub(super) fn new(source: &str, special: &Special) -> Result<Self, String> {
        let (environment, marks) =
            dialect::environment(source).map_err(|error| error.to_string())?;
        Ok(Self {
            environment,
            marks,
            source: source.to_owned(),
            tokens: Value::from_pairs(
                (special.tokens.iter()).map(|(name, token)| (name.as_str(), token.as_str())),
            ),
        })
    }

    pub(super) fn source(&self) -> &str {
        &self.source
    }

    /// Formats the whole conversation; all of it counts.
    pub(super) fn text(&self, messages: &[Value], tools: Option<&Value>) -> Result<Chat, String> {
        let text = self.render(messages, tools, false)?;
        let text = if self.marks {
            text.replace([BEGINS, ENDS], "")
        } else {
            text
        };
        Ok(Chat {
            text,
            counted: None,
        })
    }

    /// Formats the whole conversation; only the assistant's part counts.
    pub(super) fn text_counted(&self, conversation: &Conversation) -> Result<Chat, String> {
        let (messages, tools) = (&conversation.messages[..], conversation.tools.as_ref());
        if !self.marks {
            return self.by_turns(messages, tools, &conversation.counts);
        }
        let marked = self.render(messages, tools, false)?;
        let mut text = String::with_capacity(marked.len());
        let mut counted: Vec<Range<usize>> = Vec::new();
        let mut begun = None;
        for part in marked.split_inclusive([BEGINS, ENDS]) {
            let said = part.trim_end_matches([BEGINS, ENDS]);
            text += said;
            match (part[said.len()..].chars().next(), begun) {
                (Some(BEGINS), None) => begun = Some(text.len()),
                (Some(ENDS), Some(start)) => {
                    counted.push(start..text.len());
                    begun = None;
                }
                (None, None) => {}
                _ => return Err("the template's generation marks are not in pairs, or the conversation contains U+FDD0 or U+FDD1".into()),
            }
        }
        let turns = messages.iter().zip(&conversation.counts);
        let counts: Vec<bool> = turns
            .filter(|(message, _)| is_assistant(message))
            .map(|(_, counts)| *counts)
            .collect();
        if !counts.iter().all(|counts| *counts) {
            if counts.len() != counted.len() {
                return Err(format!(
                    "the template marks {} parts of the assistant's {} messages, so those that must not count cannot be found: use another template (data.chat_template), or data.loss_on = \"all\"",
                    counted.len(),
                    counts.len()
                ));
            }
            let mut counts = counts.into_iter();
            counted.retain(|_| counts.next().unwrap_or(true));
        }
        Ok(Chat {
            text,
            counted: Some(counted),
        })
    }

    fn by_turns(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        counts: &[bool],
    ) -> Result<Chat, String> {
        let text = self.render(messages, tools, false)?;
        let mut counted = Vec::new();
        for (turn, message) in messages.iter().enumerate() {
            if !(counts[turn] && is_assistant(message)) {
                continue;
            }
            let with = match turn + 1 == messages.len() {
                true => text.clone(),
                false => self.render(&messages[..=turn], tools, false)?,
            };
            let before = match turn {
                0 => self.before_first(&with)?,
                _ => self.render(&messages[..turn], tools, true)?,
            };
            let content = message.get_attr("content").unwrap_or_default();
            let words = content.as_str().map(str::trim).unwrap_or_default();
            let Some(part) = part_of_turn(&text, &with, &before, words) else {
                return Err(format!(
                    "the template formats message {} differently once others follow, so the assistant's part cannot be found: use a template that does not, such as data.chat_template = \"chatml\", or one with {{% generation %}}; conversations that end with their first answer; or data.loss_on = \"all\"",
                    turn + 1
                ));
            };
            counted.push(part);
        }
        Ok(Chat {
            text,
            counted: Some(counted),
        })
    }

    /// Returns the text before the assistant's words in `turn`, which begins a conversation: the template's
    /// default system message, if it has one, and its generation prompt. A template may refuse an empty
    /// conversation, so a conversation with a question is formatted to find both.
    fn before_first(&self, turn: &str) -> Result<String, String> {
        let question = [context! { role => "user", content => "?" }];
        let asked = self.render(&question, None, false)?;
        let ready = self.render(&question, None, true)?;
        let begins = ready.strip_prefix(&asked).filter(|text| !text.is_empty());
        let found = begins.and_then(|begins| Some(turn.find(begins)? + begins.len()));
        match found {
            Some(end) => Ok(turn[..end].to_owned()),
            None => Err("the assistant speaks first, and this template does not show where its part begins: use one with {% generation %} (data.chat_template), leave such conversations out, or set data.loss_on = \"all\"".into()),
        }
    }

    pub(super) fn render(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<String, String> {
        let conversation = context! {
            messages => messages,
            tools => tools,
            documents => (),
            add_generation_prompt => add_generation_prompt,
        };
        let values = context! { ..conversation, ..self.tokens.clone() };
        dialect::render(&self.environment, values)
            .map_err(|message| format!("the chat template failed: {message}"))
    }
}

/// Returns the assistant's part of a turn in `text`: what the turn adds to `before` in `with`, the conversation that ends
/// with it. Its start may be missing in `text` if all of `words`, the message, and what follows them are there.
fn part_of_turn(text: &str, with: &str, before: &str, words: &str) -> Option<Range<usize>> {
    let added = with.strip_prefix(before)?;
    if text.starts_with(with) {
        return Some(before.len()..with.len());
    }
    let rest = text.strip_prefix(before)?;
    let mut starts = added.match_indices(words).map(|(at, _)| &added[at..]);
    let kept = starts.find(|kept| !words.is_empty() && rest.starts_with(kept))?;
    Some(before.len()..before.len() + kept.len())
}

fn is_assistant(message: &Value) -> bool {
    message.get_attr("role").unwrap_or_default().as_str() == Some("assistant")
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHATML: &str = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}";
    const MARKED: &str = "{%- for m in messages -%}\n<|{{ m.role }}|>\n  {%- if m.role == 'assistant' %}\n    {%- generation -%}\n    {{ m.content + '<|end|>' }}\n    {%- endgeneration -%}\n  {%- else -%}\n    {{ m.content }}\n  {%- endif %}\n{% endfor %}";

    fn template(source: &str) -> Template {
        let mut special = Special::default();
        special.tokens.insert("bos_token".into(), "<s>".into());
        Template::new(source, &special).unwrap()
    }

    fn conversation() -> Vec<Value> {
        let step_order = [
            ("user", "hi"),
            ("assistant", "hello"),
            ("user", "and?"),
            ("assistant", "bye"),
        ];
        let message = |&(role, content): &(&str, &str)| context! { role, content };
        step_order.iter().map(message).collect()
    }

    fn all(messages: Vec<Value>) -> Conversation {
        Conversation {
            counts: vec![true; messages.len()],
            messages,
            tools: None,
        }
    }

    #[test]
    fn messages_may_be_left_out_of_the_loss() {
        let mut some = all(conversation());
        some.counts[1] = false;
        let by_turns = template(CHATML).text_counted(&some).unwrap();
        assert_eq!(said(&by_turns), ["bye<|end|>\n"]);
        let marked = template(MARKED).text_counted(&some).unwrap();
        assert_eq!(said(&marked), ["bye<|end|>"]);
        // Marks around several messages do not show where one of them is.
        let once =
            "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}";
        let error = template(once).text_counted(&some).unwrap_err();
        assert!(
            error.contains("marks 1 parts of the assistant's 2 messages"),
            "{error}"
        );
    }

    fn said(chat: &Chat) -> Vec<&str> {
        let ranges = chat.counted.as_ref().unwrap().iter();
        ranges.map(|range| &chat.text[range.clone()]).collect()
    }

    #[test]
    fn each_turn_is_the_text_that_it_adds() {
        let chat = template(CHATML).text_counted(&all(conversation())).unwrap();
        assert_eq!(said(&chat), ["hello<|end|>\n", "bye<|end|>\n"]);
        let all = template(CHATML).text(&conversation(), None).unwrap();
        assert_eq!((all.text, all.counted), (chat.text, None));
    }

    /// A template like Qwen's, which examines the first message and adds a system message if there is none.
    #[test]
    fn only_the_assistants_words_count_if_it_speaks_first() {
        let greeting: Vec<Value> = conversation()[1..].to_vec();
        let source = format!(
            "{{% if messages[0].role != 'system' %}}<|system|>\nBe brief.<|end|>\n{{% endif %}}{CHATML}"
        );
        for source in [CHATML, &source] {
            let chat = template(source)
                .text_counted(&all(greeting.clone()))
                .unwrap();
            assert_eq!(said(&chat), ["hello<|end|>\n", "bye<|end|>\n"]);
            let alone = template(source)
                .text_counted(&all(greeting[..1].to_vec()))
                .unwrap();
            assert_eq!(said(&alone), ["hello<|end|>\n"]);
        }
        // Without a generation prompt, the start of the assistant's part is unknown.
        let bare = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}";
        let error = template(bare)
            .text_counted(&all(greeting.clone()))
            .unwrap_err();
        assert!(error.contains("the assistant speaks first"), "{error}");
    }

    /// Jinja2 converts each line end of a template to a line feed, and keeps those of a conversation.
    #[test]
    fn line_ends_of_a_template_become_line_feeds() {
        let message = context! { role => "user", content => "a\r\nb" };
        let expected = "<|user|>\na\r\nb<|end|>\n";
        for end in ["\n", "\r\n", "\r"] {
            let source = CHATML.replace('\n', end);
            let chat = template(&source).text(std::slice::from_ref(&message), None);
            assert_eq!(chat.unwrap().text, expected, "{end:?}");
        }
        let literal = template("{{ 'a\r\nb' }}\r\n{# c #}\r\n{%- if true %}\r\n  d{% endif %}\r\n");
        assert_eq!(literal.text(&[message], None).unwrap().text, "a\nb\n  d");
    }

    #[test]
    fn generation_marks_of_a_template_are_used() {
        let chat = template(MARKED).text_counted(&all(conversation())).unwrap();
        assert_eq!(said(&chat), ["hello<|end|>", "bye<|end|>"]);
        let all = template(MARKED).text(&conversation(), None).unwrap();
        assert_eq!(all.text, chat.text);
        assert!(!all.text.contains([BEGINS, ENDS]));
    }

    /// As Qwen3's template does with the empty reasoning of earlier turns.
    #[test]
    fn a_whole_message_counts_where_a_template_leaves_out_what_precedes_it() {
        let source = "{% for m in messages %}<|{{ m.role }}|>\n{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}";
        let chat = template(source).text_counted(&all(conversation())).unwrap();
        assert_eq!(
            said(&chat),
            ["hello<|end|>\n", "<think>\n\n</think>\n\nbye<|end|>\n"]
        );
        // Words that also occur in the template's own text.
        for words in ["think", "end", "n"] {
            let mut messages = conversation();
            messages[1] = context! { role => "assistant", content => words };
            let chat = template(source).text_counted(&all(messages)).unwrap();
            assert_eq!(said(&chat)[0], format!("{words}<|end|>\n"));
        }
        // Reasoning that the template drops would be lost without a word.
        let mut messages = conversation();
        messages[1] = context! { role => "assistant", content => "<think>why</think>hello" };
        let error = template(source).text_counted(&all(messages)).unwrap_err();
        assert!(error.contains("formats message 2 differently"), "{error}");
    }

    #[test]
    fn a_template_that_rewrites_turns_is_refused() {
        let source = "{% for m in messages %}{% if loop.last %}<think>{% endif %}{{ m.content }};{% endfor %}";
        let error = template(source)
            .text_counted(&all(conversation()))
            .unwrap_err();
        assert!(error.contains("formats message 2 differently"), "{error}");
        let first: Vec<Value> = conversation().into_iter().take(2).collect();
        let error = template(source).text_counted(&all(first)).unwrap_err();
        assert!(error.contains("message 2"), "{error}");
    }

    #[test]
    fn marks_in_a_conversation_are_refused() {
        let message = context! { role => "user", content => "a\u{FDD0}b" };
        let error = template(MARKED)
            .text_counted(&all(vec![message]))
            .unwrap_err();
        assert!(error.contains("U+FDD0"), "{error}");
    }

    #[test]
    fn template_errors_are_reported_and_endless_templates_stopped() {
        let refused = |source: &str| template(source).text(&conversation(), None).unwrap_err();
        assert_eq!(
            refused("{{ raise_exception('roles must alternate') }}"),
            "the chat template failed: roles must alternate"
        );
        let endless =
            "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}";
        assert!(refused(endless).contains("fuel"), "{}", refused(endless));
        assert!(Template::new("{% for %}", &Special::default()).is_err());
        assert!(Template::new("{% if x", &Special::default()).is_err());
    }

    #[test]
    fn templates_have_the_variables_and_functions_of_transformers() {
        let text = |source: &str| template(source).text(&conversation(), None).unwrap().text;
        assert_eq!(text("{{ bos_token }}{{ messages | length }}"), "<s>4");
        assert_eq!(text("{{ messages[0]['content'].upper() }}"), "HI");
        assert_eq!(
            text("{{ messages[0] | tojson }}"),
            r#"{"role": "user", "content": "hi"}"#
        );
        assert_eq!(
            text("{{ {'a': [1, 2.0, true, none, 'ü<']} | tojson(indent=1) }}"),
            "{\n \"a\": [\n  1,\n  2.0,\n  true,\n  null,\n  \"ü<\"\n ]\n}"
        );
        assert_eq!(
            text("{{ true }} {{ none }} {{ tools is none }}"),
            "True None True"
        );
        assert_eq!(text("{{ strftime_now('%Y') | length }}"), "4");
        assert_eq!(
            text(
                "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% break %}{% endfor %}ok"
            ),
            "ok"
        );
        assert_eq!(
            text("{{ 'a' if undefined_thing is defined else 'b' }}"),
            "b"
        );
    }
}
