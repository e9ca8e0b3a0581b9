//! Reads a `tokenizer.json` with Hugging Face's own library.

use std::ops::Range;
use std::path::{Path, PathBuf};

use chat_template::{Map, Value};
use tokenizers::Tokenizer;

use super::chat::{ChatText, Template};
use super::special::{Special, read_bounded};
use super::templates;
use super::{BEGINS, ChatFormat, EncodedDocuments, Encoding, NOT_COUNTED};
use crate::config::LossOn;
use crate::data::DataError;
use crate::data::read::{Document, PIECE_BYTES, cut, end_of};
use training_state::fingerprint::Fingerprint;

/// Size limit of the file; the largest published ones have about 40 MB.
const FILE_BYTES_MAX: u64 = 1 << 30;
/// Longest record in which some tokens do not count. Such a record is tokenized as a whole, which takes some
/// hundred bytes for each of its bytes.
const COUNTED_BYTES_MAX: usize = 16 << 20;

fn message(role: &str, content: &str) -> Value {
    let keys = [("role", role), ("content", content)];
    let keys = keys.map(|(key, value)| (key, Value::from(value)));
    Value::from(keys.into_iter().collect::<Map>())
}

/// Tokens that a template puts between angle brackets and the tokenizer does not have.
fn missing(template: &Template, tokenizer: &Tokenizer) -> Vec<String> {
    let roles = ["system", "user", "assistant"];
    let messages = roles.map(|role| message(role, "Words"));
    let text = template.text(&messages, None).map(|chat| chat.text);
    let tokens = templates::tokens(&text.unwrap_or_default()).into_iter();
    tokens
        .filter(|token| tokenizer.token_to_id(token).is_none())
        .collect()
}

/// Tokenizer with the files beside it.
pub(in crate::data) struct HuggingFace {
    path: PathBuf,
    inner: Tokenizer,
    /// Tokens that it adds before and after each text.
    before: Vec<u32>,
    behind: Vec<u32>,
    /// Token that ends a document.
    eos: Option<u32>,
    special: Special,
    template: Option<Template>,
    /// Whether the run names it.
    names_template: bool,
    /// Tokens of a named template that the tokenizer lacks.
    missing: Vec<String>,
    ids_end: u64,
    fingerprint: u64,
}

impl HuggingFace {
    pub(super) fn open(
        path: &Path,
        key: &'static str,
        template: Option<&Path>,
    ) -> Result<Self, DataError> {
        let wrong = |message: String| DataError::Setting {
            key,
            message: format!("{}: {message}", path.display()),
        };
        let json = read_bounded(path, key, FILE_BYTES_MAX)?;
        let mut inner = Tokenizer::from_bytes(&json)
            .map_err(|error| wrong(format!("is not a tokenizer: {error}")))?;
        // Only packing truncates and pads documents.
        inner
            .with_truncation(None)
            .map_err(|error| wrong(error.to_string()))?
            .with_padding(None);
        let dir = path.parent().unwrap_or(Path::new("."));
        let mut special = Special::read(dir, key)?;
        let with_tools = special
            .template_with_tools
            .take()
            .filter(|_| template.is_none());
        let source = match template {
            None => special.template.clone(),
            Some(name) => Some(match templates::named(name) {
                Some(source) => source.to_owned(),
                None if !name.exists() => {
                    return Err(DataError::Setting {
                        key: "data.chat_template",
                        message: format!(
                            "\"{}\" is neither a file nor the name of a known template ({})",
                            name.display(),
                            templates::names()
                        ),
                    });
                }
                None => text(name, "data.chat_template")?,
            }),
        };
        let is_known = template.and_then(templates::named).is_some();
        let names_template = template.is_some();
        let template_key = template.map_or(key, |_| "data.chat_template");
        let template = source
            .map(|source| Template::new(&source, with_tools.as_deref(), &special))
            .transpose()
            .map_err(|message| DataError::Setting {
                key: template_key,
                message: format!("the chat template of {}: {message}", dir.display()),
            })?;
        let missing = match template.as_ref().filter(|_| is_known) {
            Some(template) => missing(template, &inner),
            None => Vec::new(),
        };
        let ids_end = inner
            .get_vocab(true)
            .into_values()
            .max()
            .map_or(0, |id| u64::from(id) + 1);
        if ids_end == 0 || ids_end > u64::from(BEGINS) {
            return Err(wrong(format!(
                "has {ids_end} tokens, but 1 to {BEGINS} are supported: use another tokenizer (data.tokenizer)"
            )));
        }
        let eos = match &special.eos {
            None => special.eos_id.filter(|id| u64::from(*id) < ids_end),
            Some(token) => Some(inner.token_to_id(token).ok_or_else(|| {
                wrong(format!(
                    "eos_token \"{token}\" of tokenizer_config.json is not among its tokens"
                ))
            })?),
        };
        let (before, behind) = frame(&inner).map_err(wrong)?;
        let mut print = Fingerprint::default();
        print.add(&json);
        print.add(&special.fingerprint().to_le_bytes());
        print.add(&eos.map_or(u64::MAX, u64::from).to_le_bytes());
        if let Some(template) = &template {
            print.add(template.source().as_bytes());
        }
        Ok(Self {
            path: path.into(),
            inner,
            before,
            behind,
            eos,
            special,
            template,
            names_template,
            missing,
            ids_end,
            fingerprint: print.finish(),
        })
    }

    pub(super) fn describe(&self) -> String {
        let eos = match (&self.special.eos, self.eos) {
            (Some(token), _) => format!("a text ends with {token}"),
            (None, Some(id)) => format!("a text ends with token {id}"),
            (None, None) => "no token ends a text: its directory names none".into(),
        };
        format!("{}, {} tokens; {eos}", self.path.display(), self.ids_end)
    }

    /// What a person should know of the template.
    pub(super) fn warning(&self) -> Option<String> {
        (!self.missing.is_empty()).then(|| {
            format!(
                "data.chat_template: the tokenizer lacks {}, which become several tokens each: the end of an answer may be none that generation stops at. Use a template whose tokens it has",
                self.missing.join(" and ")
            )
        })
    }

    pub(super) fn ids_end(&self) -> u64 {
        self.ids_end
    }

    pub(super) fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    pub(super) fn padding(&self) -> u32 {
        self.eos.unwrap_or(0)
    }

    /// The template that the run names, and the token that ends an answer in it.
    pub(super) fn chat_format(&self) -> Option<ChatFormat> {
        let template = (self.template.as_ref()).filter(|_| self.names_template)?;
        let messages = [message("user", "Question"), message("assistant", "Answer")];
        let answer_end = template.text(&messages, None).ok().and_then(|chat| {
            let (_, end) = chat.text.rsplit_once("Answer")?;
            let ids = self.inner.encode(end.trim_start(), false).ok()?;
            let id = *ids.get_ids().first()?;
            self.inner
                .get_added_tokens_decoder()
                .get(&id)?
                .special
                .then_some(id)
        });
        Some(ChatFormat {
            template: template.source().to_owned(),
            answer_end,
        })
    }

    pub(super) fn check_chat(&self) -> Result<(), DataError> {
        if self.template.is_some() {
            return Ok(());
        }
        let dir = self.path.parent().unwrap_or(Path::new("."));
        Err(DataError::NoTemplate {
            dir: dir.into(),
            names: templates::names(),
        })
    }

    pub(super) fn encode(
        &self,
        document: &Document,
        after: Option<&str>,
        ends: bool,
        encoding: Encoding,
    ) -> Result<EncodedDocuments, String> {
        match document {
            Document::Bytes(_) => {
                unreachable!("text files are read as text if there is a tokenizer")
            }
            Document::Ids { .. } => unreachable!("token ids are not tokenized"),
            Document::Text(text) => {
                let mut ids = self.ids(text, after.unwrap_or_default(), PIECE_BYTES)?;
                if after.is_none() {
                    ids.splice(0..0, self.before.iter().copied());
                }
                if ends {
                    self.end(&mut ids);
                }
                Ok(ids.into())
            }
            Document::Completion { prompt, completion } => {
                let text = format!("{prompt}{completion}");
                let completion = prompt.len()..text.len();
                let counted = match encoding.loss_on {
                    LossOn::All => None,
                    LossOn::Completions => Some(std::slice::from_ref(&completion)),
                };
                let mut ids = self.ids_counted(&text, counted)?;
                let not_counted = counted.map_or(0, |_| NOT_COUNTED);
                ids.splice(0..0, self.before.iter().map(|id| id | not_counted));
                self.end(&mut ids);
                Ok(ids.into())
            }
            Document::Chat(chat) => {
                let template = self
                    .template
                    .as_ref()
                    .expect("check_chat has found a template");
                let chats = match encoding.loss_on {
                    LossOn::All => vec![template.text(&chat.messages, chat.tools.as_ref())?],
                    LossOn::Completions => template.texts_counted(chat)?,
                };
                let ids = |chat: &ChatText| self.ids_counted(&chat.text, chat.counted.as_deref());
                Ok(EncodedDocuments {
                    documents: chats.iter().map(ids).collect::<Result<_, _>>()?,
                    findings: template.examine(chat, &chats),
                })
            }
        }
    }

    pub(super) fn decode(&self, ids: &[u32]) -> String {
        let text = self.inner.decode(ids, false);
        text.unwrap_or_else(|error| format!("({} tokens: {error})", ids.len()))
    }

    /// Adds the tokens that the tokenizer puts after a text, and the end-of-document token unless that is one
    /// of them.
    fn end(&self, ids: &mut Vec<u32>) {
        ids.extend(&self.behind);
        if let Some(eos) = self.eos
            && ids.last() != Some(&eos)
        {
            ids.push(eos);
        }
    }

    /// Tokenizes a text that continues `after` another; a long one in pieces, like a long file.
    pub(super) fn ids(
        &self,
        text: &str,
        after: &str,
        piece_bytes: usize,
    ) -> Result<Vec<u32>, String> {
        let mut ids = Vec::new();
        let (mut rest, mut after) = (text, after);
        loop {
            let piece = match rest.len() > piece_bytes {
                true => &rest[..cut(&rest.as_bytes()[..piece_bytes])],
                false => rest,
            };
            rest = &rest[piece.len()..];
            ids.extend(self.piece(piece, after)?);
            if rest.is_empty() {
                return Ok(ids);
            }
            after = end_of(piece);
        }
    }

    /// Tokenizes a piece as a continuation of `after`: a tokenizer may add a space at the beginning of each
    /// text, which must not happen inside one. If a token spans the boundary, which no known tokenizer has at
    /// a [`cut`] between words, the piece is tokenized alone.
    fn piece(&self, piece: &str, after: &str) -> Result<Vec<u32>, String> {
        let encode = |text: &str| {
            let found = self.inner.encode_fast(text, false);
            let found = found.map_err(|error| format!("cannot be tokenized: {error}"))?;
            Ok::<_, String>(found.get_ids().to_vec())
        };
        if after.is_empty() {
            return encode(piece);
        }
        let before = encode(after)?;
        let both = encode(&format!("{after}{piece}"))?;
        match both.strip_prefix(&before[..]) {
            Some(ids) => Ok(ids.to_vec()),
            None => encode(piece),
        }
    }

    /// Tokenizes a text. Tokens with a byte in one of `counted` count; all if it is `None`.
    fn ids_counted(
        &self,
        text: &str,
        counted: Option<&[Range<usize>]>,
    ) -> Result<Vec<u32>, String> {
        let Some(counted) = counted else {
            return self.ids(text, "", PIECE_BYTES);
        };
        if text.len() > COUNTED_BYTES_MAX {
            return Err(format!(
                "has {} MB: a prompt or a conversation may have at most {}",
                text.len() / 1_000_000,
                COUNTED_BYTES_MAX / 1_000_000
            ));
        }
        let found = self.inner.encode(text, false);
        let found = found.map_err(|error| format!("cannot be tokenized: {error}"))?;
        let mut ranges = counted.iter().peekable();
        let ids = found.get_ids().iter().zip(found.get_offsets());
        let ids = ids.map(|(id, &(start, end))| {
            while ranges.next_if(|range| range.end <= start).is_some() {}
            let counts = ranges
                .peek()
                .is_some_and(|range| range.start < end.max(start + 1));
            if counts { *id } else { *id | NOT_COUNTED }
        });
        Ok(ids.collect())
    }
}

/// Tokens that the tokenizer's post-processor adds before and after a text.
fn frame(inner: &Tokenizer) -> Result<(Vec<u32>, Vec<u32>), String> {
    let ids = |special| {
        let found = inner
            .encode("a", special)
            .map_err(|error| error.to_string());
        found.map(|found| found.get_ids().to_vec())
    };
    let (bare, framed) = (ids(false)?, ids(true)?);
    let added = framed.len().saturating_sub(bare.len());
    let place = (0..=added).find(|&at| framed[at..].starts_with(&bare));
    let at = place.ok_or("its post-processor changes the text itself, which is not supported")?;
    Ok((framed[..at].to_vec(), framed[at + bare.len()..].to_vec()))
}

fn text(path: &Path, key: &'static str) -> Result<String, DataError> {
    let bytes = read_bounded(path, key, FILE_BYTES_MAX)?;
    String::from_utf8(bytes).map_err(|_| DataError::Setting {
        key,
        message: format!("{} is not UTF-8 text", path.display()),
    })
}
