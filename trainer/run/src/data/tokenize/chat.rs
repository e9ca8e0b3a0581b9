//! Formats conversations with the tokenizer's template, and finds the assistant's part in the text.
//!
//! If a template marks that part (`{% generation %}`), the marks are used. For other templates, the
//! assistant's part of a turn is what the turn adds to the conversation before it with a generation prompt. If the
//! assistant speaks first, its part begins after the template's generation prompt.
//!
//! ```text
//!   the conversation up to the turn is ...              the turn counts ...
//!   a prefix of the whole conversation                  in the whole conversation
//!   the same without the token that ends it (Phi-3's)   there too, without that token
//!   the same but for what precedes the message          there too: the message and what follows it
//!     (Qwen3's empty block of reasoning)
//!   another text (Qwen3's drops earlier reasoning)      in a text of its own: the conversation up to the turn
//! ```
//!
//! A template with which a turn does not continue the conversation before it, even if it is the last one, is refused
//! with the position of the message.

use std::cell::LazyCell;
use std::ops::Range;

use chat_template::{Map, RenderedText, Value};

use super::special::Special;
use crate::data::findings::{Finding, FindingKind};
use crate::data::read::Chat as Conversation;

/// A chat template.
pub(super) struct Template {
    inner: chat_template::Template,
    /// Template for conversations with tools, if the tokenizer has one for them.
    with_tools: Option<chat_template::Template>,
    source: String,
    /// `bos_token` and other tokens that templates refer to.
    tokens: Map,
}

/// Conversation as text.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ChatText {
    pub(super) text: String,
    /// Bytes that count in the loss; `None`: all.
    pub(super) counted: Option<Vec<Range<usize>>>,
}

impl Template {
    /// Parses a template, and the one for conversations with tools.
    pub(super) fn new(
        source: &str,
        with_tools: Option<&str>,
        special: &Special,
    ) -> Result<Self, String> {
        let parse = |source: &str| {
            chat_template::Template::parse(source).map_err(|error| error.to_string())
        };
        Ok(Self {
            inner: parse(source)?,
            with_tools: with_tools.map(parse).transpose()?,
            source: format!("{source}{}", with_tools.unwrap_or_default()),
            tokens: (special.tokens.iter())
                .map(|(name, token)| (name, token.as_str().into()))
                .collect(),
        })
    }

    pub(super) fn source(&self) -> &str {
        &self.source
    }

    fn for_tools(&self, tools: Option<&Value>) -> &chat_template::Template {
        let with_tools = self.with_tools.as_ref().filter(|_| tools.is_some());
        with_tools.unwrap_or(&self.inner)
    }

    /// Formats the whole conversation; all of it counts.
    pub(super) fn text(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
    ) -> Result<ChatText, String> {
        Ok(ChatText {
            text: self.render(messages, tools, false)?,
            counted: None,
        })
    }

    /// Formats the conversation; only the assistant's part counts. Returns the whole conversation last, and before it the
    /// conversation up to each turn that the template changes once others follow.
    pub(super) fn texts_counted(
        &self,
        conversation: &Conversation,
    ) -> Result<Vec<ChatText>, String> {
        match self.for_tools(conversation.tools.as_ref()).has_generation() {
            true => Ok(vec![self.by_marks(conversation)?]),
            false => self.by_turns(conversation),
        }
    }

    fn by_marks(&self, conversation: &Conversation) -> Result<ChatText, String> {
        let (messages, tools) = (&conversation.messages[..], conversation.tools.as_ref());
        let RenderedText {
            text,
            generated: mut counted,
        } = self.rendered(messages, tools, false)?;
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
        Ok(ChatText {
            text,
            counted: Some(counted),
        })
    }

    fn by_turns(&self, conversation: &Conversation) -> Result<Vec<ChatText>, String> {
        let (messages, tools) = (&conversation.messages[..], conversation.tools.as_ref());
        let counts = |turn: &usize| conversation.counts[*turn] && is_assistant(&messages[*turn]);
        let mut turns: Vec<usize> = (0..messages.len()).filter(counts).collect();
        let mut end = messages.len();
        let mut chats = Vec::new();
        loop {
            let text = self.render(&messages[..end], tools, false)?;
            let mut counted = Vec::new();
            let mut changed = Vec::new();
            for turn in turns {
                match self.part_of_turn(&text, &messages[..=turn], tools)? {
                    Some(part) => counted.push(part),
                    None if turn + 1 == end => {
                        return Err(format!(
                            "the template does not format message {} as the text that follows its generation prompt, so the assistant's part cannot be found: use another template, such as data.chat_template = \"chatml\", or one with {{% generation %}}; or set data.loss_on = \"all\"",
                            turn + 1
                        ));
                    }
                    None => changed.push(turn),
                }
            }
            let last = changed.last().copied();
            // Without a turn that counts, the text would teach nothing that the others do not.
            if !counted.is_empty() || last.is_none() {
                chats.push(ChatText {
                    text,
                    counted: Some(counted),
                });
            }
            let Some(last) = last else { break };
            end = last + 1;
            turns = changed;
        }
        chats.reverse();
        Ok(chats)
    }

    /// Returns the assistant's part of the last of `messages` in `text`, the conversation that begins with them; `None` if
    /// the text has another form of it.
    fn part_of_turn(
        &self,
        text: &str,
        messages: &[Value],
        tools: Option<&Value>,
    ) -> Result<Option<Range<usize>>, String> {
        let (message, earlier) = messages.split_last().expect("a turn is a message");
        let with = self.render(messages, tools, false)?;
        let before = match earlier {
            [] => self.before_first(&with)?,
            _ => self.render(earlier, tools, true)?,
        };
        let Some(added) = with.strip_prefix(&before) else {
            return Ok(None);
        };
        if text.starts_with(&with) {
            return Ok(Some(before.len()..with.len()));
        }
        // The token that ends a conversation comes after the last message only.
        let eos = self.tokens.get("eos_token").and_then(Value::as_str);
        let open = eos.and_then(|eos| added.strip_suffix(eos));
        if let Some(open) = open.filter(|open| !open.is_empty()) {
            let end = before.len() + open.len();
            if text.starts_with(&with[..end]) {
                return Ok(Some(before.len()..end));
            }
        }
        // What precedes the message may be missing if all of the message and what follows it are there.
        let Some(rest) = text.strip_prefix(&before) else {
            return Ok(None);
        };
        let words = words(message, "content");
        let mut starts = added.match_indices(words).map(|(at, _)| added.split_at(at));
        let found = starts.find(|(missing, kept)| {
            // Fields such as "reasoning_content" are part of the message.
            let keys = message.as_map().into_iter().flat_map(Map::iter);
            let keys = keys.filter_map(|(key, _)| key.as_str());
            let mut others = keys.filter(|key| *key != "role" && *key != "content");
            let is_missing = |key: &str| {
                let said = self::words(message, key);
                !said.is_empty() && missing.contains(said)
            };
            !words.is_empty() && rest.starts_with(kept) && !others.any(is_missing)
        });
        Ok(found.map(|(_, kept)| before.len()..before.len() + kept.len()))
    }

    /// Returns the text before the assistant's words in `turn`, which begins a conversation: the template's
    /// default system message, if it has one, and its generation prompt. A template may refuse an empty
    /// conversation, so a conversation with a question is formatted to find both.
    fn before_first(&self, turn: &str) -> Result<String, String> {
        let question = [Value::from_pairs([
            ("role", "user".into()),
            ("content", "?".into()),
        ])];
        let asked = self.render(&question, None, false)?;
        let ready = self.render(&question, None, true)?;
        let begins = ready.strip_prefix(&asked).filter(|text| !text.is_empty());
        let found = begins.and_then(|begins| Some(turn.find(begins)? + begins.len()));
        match found {
            Some(end) => Ok(turn[..end].to_owned()),
            None => Err("the assistant speaks first, and this template does not show where its part begins: use one with {% generation %} (data.chat_template), leave such conversations out, or set data.loss_on = \"all\"".into()),
        }
    }

    /// Finds what a person should know: answers whose end does not count, roles that do not count, and parts of the
    /// conversation that the template does not print.
    pub(super) fn examine(&self, conversation: &Conversation, chats: &[ChatText]) -> Vec<Finding> {
        // What a template makes of calls ends in a form of its own, so an answer in words tells.
        let leaves_calls_open = LazyCell::new(|| self.leaves_answers_open(conversation, chats));
        let mut found: Vec<Finding> = chats
            .iter()
            .flat_map(|chat| answers(conversation, chat))
            .map(|(said, message)| {
                let words = words(message, "content");
                let is_open = match words.is_empty() {
                    false => said.trim_end().ends_with(words),
                    true => is_filled(message.get("tool_calls")) && *leaves_calls_open,
                };
                Finding::new(FindingKind::Answers, is_open, excerpt(words))
            })
            .collect();
        if chats.iter().any(|chat| chat.counted.is_some()) {
            let roles = conversation
                .messages
                .iter()
                .map(|message| words(message, "role"));
            let unknown = roles.filter(|role| !ROLES.contains(role));
            let finding =
                |role: &str| Finding::new(FindingKind::Role(role.into()), true, String::new());
            found.extend(unknown.map(finding));
        }
        for message in &conversation.messages {
            let why = words(message, "reasoning_content");
            if !why.is_empty() {
                let is_lost = !chats.iter().any(|chat| chat.text.contains(why));
                found.push(Finding::new(FindingKind::Reasoning, is_lost, excerpt(why)));
            }
        }
        self.examine_tools(conversation, &mut found);
        found
    }

    /// Whether the end of an answer in words would not count, in a conversation formatted as `chats`.
    fn leaves_answers_open(&self, conversation: &Conversation, chats: &[ChatText]) -> bool {
        const ANSWER: &str = "so";
        let message = |role: &str, content: &str| {
            Value::from_pairs([("role", role.into()), ("content", content.into())])
        };
        let short = Conversation {
            messages: vec![message("user", "?"), message("assistant", ANSWER)],
            counts: vec![false, true],
            tools: conversation.tools.clone(),
        };
        let formatted = match chats.iter().any(|chat| chat.counted.is_some()) {
            true => self.texts_counted(&short),
            false => (self.text(&short.messages, short.tools.as_ref())).map(|chat| vec![chat]),
        };
        // What cannot be formatted has been said of the conversation itself.
        let formatted = formatted.unwrap_or_default();
        let mut answers = formatted.iter().flat_map(|chat| answers(&short, chat));
        answers.any(|(said, _)| said.trim_end().ends_with(ANSWER))
    }

    /// Finds tools and calls of tools without which the text would be the same.
    fn examine_tools(&self, conversation: &Conversation, found: &mut Vec<Finding>) {
        let (messages, tools) = (&conversation.messages[..], conversation.tools.as_ref());
        let has_calls = messages
            .iter()
            .any(|message| is_filled(message.get("tool_calls")));
        if !is_filled(tools) && !has_calls {
            return;
        }
        let text =
            |messages: &[Value], tools: Option<&Value>| self.render(messages, tools, false).ok();
        let whole = text(messages, tools);
        let is_same = |other: Option<String>| other.is_some() && other == whole;
        if is_filled(tools) {
            let is_lost = is_same(text(messages, None));
            found.push(Finding::new(FindingKind::Tools, is_lost, String::new()));
        }
        if has_calls {
            let silent = messages
                .iter()
                .map(|message| without(message, "tool_calls"));
            let is_lost = is_same(text(&silent.collect::<Vec<_>>(), tools));
            found.push(Finding::new(FindingKind::Calls, is_lost, String::new()));
        }
    }

    pub(super) fn render(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<String, String> {
        let rendered = self.rendered(messages, tools, add_generation_prompt)?;
        Ok(rendered.text)
    }

    fn rendered(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<RenderedText, String> {
        let mut values = self.tokens.clone();
        for (name, value) in [
            ("messages", messages.to_vec().into()),
            ("tools", tools.cloned().unwrap_or_default()),
            ("documents", Value::None),
            ("add_generation_prompt", add_generation_prompt.into()),
        ] {
            values.insert(name, value);
        }
        let rendered = self.for_tools(tools).render(&values);
        rendered.map_err(|error| format!("the chat template failed: {error}"))
    }
}

/// Whether this is a list with something in it.
fn is_filled(value: Option<&Value>) -> bool {
    let list = value.and_then(Value::as_list);
    list.is_some_and(|list| !list.is_empty())
}

/// Returns the answers of which the end should count, as they count, with their messages.
fn answers<'c>(conversation: &'c Conversation, chat: &'c ChatText) -> Vec<(&'c str, &'c Value)> {
    let Some(counted) = &chat.counted else {
        // The next message shows the end of all but the last one.
        let last = conversation.messages.last();
        let last = last.filter(|last| is_assistant(last));
        return last
            .map(|last| (chat.text.as_str(), last))
            .into_iter()
            .collect();
    };
    let turns = conversation.messages.iter().zip(&conversation.counts);
    let turns: Vec<&Value> = turns
        .filter(|(message, counts)| **counts && is_assistant(message))
        .map(|(message, _)| message)
        .collect();
    let parts = counted.iter().enumerate();
    parts
        .filter_map(|(at, part)| {
            let said = &chat.text[part.clone()];
            // Several texts share the turns; each part is the turn whose words it has.
            let turn = match turns.len() == counted.len() {
                true => Some(turns[at]),
                false => (turns.iter().copied())
                    .filter(|turn| said.contains(words(turn, "content")))
                    .max_by_key(|turn| words(turn, "content").len()),
            };
            Some((said, turn?))
        })
        .collect()
}

/// Roles of messages; of others the assistant's part may be meant.
const ROLES: [&str; 8] = [
    "assistant",
    "developer",
    "function",
    "ipython",
    "observation",
    "system",
    "tool",
    "user",
];

/// Longest text of an example.
const EXCERPT_CHARS: usize = 40;

/// Returns the end of a text.
fn excerpt(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let cut = chars.len().saturating_sub(EXCERPT_CHARS);
    let dots = if cut > 0 { "..." } else { "" };
    format!("{dots}{}", chars[cut..].iter().collect::<String>())
}

fn without(message: &Value, name: &str) -> Value {
    let pairs = message.as_map().into_iter().flat_map(Map::iter);
    let pairs = pairs.filter(|(key, _)| key.as_str() != Some(name));
    Value::from_pairs(pairs.filter_map(|(key, value)| Some((key.as_str()?, value.clone()))))
}

/// Text in a field of a message, without white space around it; empty if it is no text.
fn words<'m>(message: &'m Value, key: &str) -> &'m str {
    message
        .get(key)
        .and_then(Value::as_str)
        .map(str::trim)
        .unwrap_or_default()
}

fn is_assistant(message: &Value) -> bool {
    message.get("role").and_then(Value::as_str) == Some("assistant")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(role: &str, content: &str) -> Value {
        Value::from_pairs([("role", role.into()), ("content", content.into())])
    }

    const CHATML: &str = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}";
    const MARKED: &str = "{%- for m in messages -%}\n<|{{ m.role }}|>\n  {%- if m.role == 'assistant' %}\n    {%- generation -%}\n    {{ m.content + '<|end|>' }}\n    {%- endgeneration -%}\n  {%- else -%}\n    {{ m.content }}\n  {%- endif %}\n{% endfor %}";

    fn template(source: &str) -> Template {
        let mut special = Special::default();
        special.tokens.insert("bos_token".into(), "<s>".into());
        Template::new(source, None, &special).unwrap()
    }

    fn conversation() -> Vec<Value> {
        let step_order = [
            ("user", "hi"),
            ("assistant", "hello"),
            ("user", "and?"),
            ("assistant", "bye"),
        ];
        let message = |&(role, content): &(&str, &str)| message(role, content);
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
        let by_turns = only(template(CHATML), &some);
        assert_eq!(said(&by_turns), ["bye<|end|>\n"]);
        let marked = only(template(MARKED), &some);
        assert_eq!(said(&marked), ["bye<|end|>"]);
        // Marks around several messages do not show where one of them is.
        let once =
            "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}";
        let error = template(once).texts_counted(&some).unwrap_err();
        assert!(
            error.contains("marks 1 parts of the assistant's 2 messages"),
            "{error}"
        );
    }

    fn only(template: Template, conversation: &Conversation) -> ChatText {
        let mut chats = template.texts_counted(conversation).unwrap();
        assert_eq!(chats.len(), 1, "{chats:?}");
        chats.remove(0)
    }

    fn said(chat: &ChatText) -> Vec<&str> {
        let ranges = chat.counted.as_ref().unwrap().iter();
        ranges.map(|range| &chat.text[range.clone()]).collect()
    }

    #[test]
    fn each_turn_is_the_text_that_it_adds() {
        let chat = only(template(CHATML), &all(conversation()));
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
            let chat = only(template(source), &all(greeting.clone()));
            assert_eq!(said(&chat), ["hello<|end|>\n", "bye<|end|>\n"]);
            let alone = only(template(source), &all(greeting[..1].to_vec()));
            assert_eq!(said(&alone), ["hello<|end|>\n"]);
        }
        // Without a generation prompt, the start of the assistant's part is unknown.
        let bare = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}";
        let error = template(bare)
            .texts_counted(&all(greeting.clone()))
            .unwrap_err();
        assert!(error.contains("the assistant speaks first"), "{error}");
    }

    /// Jinja2 converts each line end of a template to a line feed, and keeps those of a conversation.
    #[test]
    fn line_ends_of_a_template_become_line_feeds() {
        let message = message("user", "a\r\nb");
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
        let chat = only(template(MARKED), &all(conversation()));
        assert_eq!(said(&chat), ["hello<|end|>", "bye<|end|>"]);
        let all = template(MARKED).text(&conversation(), None).unwrap();
        assert_eq!(all.text, chat.text);
    }

    /// As Qwen3's template does with the empty reasoning of earlier turns.
    #[test]
    fn a_whole_message_counts_where_a_template_leaves_out_what_precedes_it() {
        let source = "{% for m in messages %}<|{{ m.role }}|>\n{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}";
        let chat = only(template(source), &all(conversation()));
        assert_eq!(
            said(&chat),
            ["hello<|end|>\n", "<think>\n\n</think>\n\nbye<|end|>\n"]
        );
        // Words that also occur in the template's own text.
        for words in ["think", "end", "n"] {
            let mut messages = conversation();
            messages[1] = message("assistant", words);
            let chat = only(template(source), &all(messages));
            assert_eq!(said(&chat)[0], format!("{words}<|end|>\n"));
        }
    }

    /// As Qwen3's does with the reasoning of earlier answers.
    #[test]
    fn an_answer_that_a_template_changes_later_is_in_a_text_of_its_own() {
        let source = "{% for m in messages %}<|{{ m.role }}|>\n{% if loop.last and m.why %}<think>{{ m.why }}</think>{% endif %}{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}";
        let inside = message("assistant", "<think>so</think>hello");
        let apart = Value::from_pairs([
            ("role", "assistant".into()),
            ("content", "hello".into()),
            ("why", "so".into()),
        ]);
        for answer in [inside, apart] {
            let mut messages = conversation();
            messages[1] = answer;
            let mut conversation = all(messages.clone());
            let chats = template(source).texts_counted(&conversation).unwrap();
            let [first, whole] = &chats[..] else {
                panic!("{chats:?}")
            };
            let asked = "<|user|>\nhi<|end|>\n<|assistant|>\n";
            assert_eq!(
                first.text,
                format!("{asked}<think>so</think>hello<|end|>\n")
            );
            assert_eq!(said(first), ["<think>so</think>hello<|end|>\n"]);
            assert_eq!(
                whole.text,
                template(source).text(&messages, None).unwrap().text
            );
            assert_eq!(said(whole), ["bye<|end|>\n"]);
            // A whole conversation in which nothing counts is left out.
            conversation.counts[3] = false;
            let chats = template(source).texts_counted(&conversation).unwrap();
            assert_eq!(chats, std::slice::from_ref(first));
            conversation.counts[1] = false;
            let none = only(template(source), &conversation);
            assert_eq!(said(&none), [""; 0]);
        }
    }

    /// As Phi-3's.
    #[test]
    fn a_token_that_ends_a_conversation_counts_after_its_last_message_only() {
        let mut special = Special::default();
        (special.tokens).insert("eos_token".into(), "<|endoftext|>".into());
        let source = CHATML.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}");
        let template = Template::new(&source, None, &special).unwrap();
        let chat = only(template, &all(conversation()));
        assert_eq!(said(&chat), ["hello<|end|>\n", "bye<|end|>\n<|endoftext|>"]);
    }

    #[test]
    fn a_template_whose_answers_do_not_follow_its_generation_prompt_is_refused() {
        let source = "{% for m in messages %}{% if loop.last %}<think>{% endif %}{{ m.content }};{% endfor %}";
        let error = template(source)
            .texts_counted(&all(conversation()))
            .unwrap_err();
        assert!(error.contains("does not format message 4 as"), "{error}");
        let first: Vec<Value> = conversation().into_iter().take(2).collect();
        let error = template(source).texts_counted(&all(first)).unwrap_err();
        assert!(error.contains("does not format message 2 as"), "{error}");
    }

    #[test]
    fn errors_of_a_template_are_reported() {
        let refused = |source: &str| template(source).text(&conversation(), None).unwrap_err();
        assert_eq!(
            refused("{{ raise_exception('roles must alternate') }}"),
            "the chat template failed: roles must alternate"
        );
        assert!(Template::new("{% for %}", None, &Special::default()).is_err());
        assert!(Template::new("{% if x", None, &Special::default()).is_err());
    }

    #[test]
    fn a_template_for_tools_is_used_for_conversations_with_tools() {
        let with_tools = "{{ tools | length }}{{ bos_token }}{{ documents }}";
        let special = Special::default();
        let template = Template::new("plain", Some(with_tools), &special).unwrap();
        let text =
            |tools: Option<Value>| template.text(&conversation(), tools.as_ref()).unwrap().text;
        assert_eq!(text(None), "plain");
        assert_eq!(text(Some(vec![Value::None].into())), "1None");
        assert!(Template::new("plain", Some("{% if"), &special).is_err());
    }
}
