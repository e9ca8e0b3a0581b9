//! Creates a token file: reads documents, tokenizes them on all threads, packs them into windows.

use rayon::prelude::*;

use super::cache::{Claim, Header, TokenFile, TokenFileWriter, claim, elem_bytes};
use super::corpus::{Corpus, CorpusPart};
use super::findings::{Finding, FindingKind, Findings};
use super::packing::{Order, Packer, stride, windows};
use super::read::{self, DocumentPosition, PIECE_BYTES, Piece, Reading};
use super::tokenize::{EncodedDocuments, NOT_COUNTED, Tokenizer};
use super::{DataError, too_short};
use crate::config::{OnBadRecord, Packing};
use offload_support::progress::{Audience, Progress, Unit};

/// Text that is tokenized at a time by all threads.
const BATCH_BYTES: u64 = 64 * PIECE_BYTES as u64;
const BATCH_DOCUMENTS: usize = 16_384;

/// A piece of a document.
struct Whole {
    piece: Piece,
    /// Whether it is the last one of its document.
    ends: bool,
    /// Whether its document is reserved for validation.
    held_out: bool,
}

impl Corpus {
    /// Like [`Corpus::prepare`], in `dir`. An `owned` directory contains nothing else: token files of earlier
    /// settings are removed.
    pub(super) fn prepare_in(
        &self,
        dir: &std::path::Path,
        owned: bool,
        threads: usize,
        say: &mut dyn FnMut(String),
    ) -> Result<(), DataError> {
        for part in self.parts() {
            ensure(self, part, dir, threads, say)?;
        }
        if owned {
            self.remove_others(dir);
        }
        Ok(())
    }
}

/// Makes sure that the token file of `part` is in `dir` and undamaged; creates it if necessary.
fn ensure(
    corpus: &Corpus,
    part: &CorpusPart,
    dir: &std::path::Path,
    threads: usize,
    say: &mut dyn FnMut(String),
) -> Result<(), DataError> {
    let path = part.path(dir);
    if good(part, &path, say)? {
        return Ok(());
    }
    let Some(claim) = claim(&path, say)? else {
        return ensure(corpus, part, dir, threads, say);
    };
    // Another trainer may have created it while this one waited.
    if TokenFile::open(&path, part.key).is_ok_and(|found| found.is_some())
        && good(part, &path, &mut |_| {})?
    {
        return Ok(());
    }
    make(corpus, part, &claim, &path, threads)?;
    claim.keep()
}

/// Returns whether the token file exists and is undamaged.
fn good(
    part: &CorpusPart,
    path: &std::path::Path,
    say: &mut dyn FnMut(String),
) -> Result<bool, DataError> {
    let check = || {
        let Some(stored) = TokenFile::open(path, part.key)? else {
            return Ok(false);
        };
        let mut work = Progress::new("checking the tokens", Unit::Bytes, Audience::Person)
            .with_total(stored.header().elements_bytes());
        stored.verify(&mut |bytes| work.add(bytes))?;
        Ok(true)
    };
    match check() {
        Err(DataError::DamagedCache {
            path,
            offset,
            message,
        }) => {
            say(format!(
                "note: the tokens in {} are damaged at byte {offset} ({message}); they will be recreated",
                path.display()
            ));
            Ok(false)
        }
        other => other,
    }
}

/// The threads that tokenize.
fn pool(threads: usize) -> Result<rayon::ThreadPool, DataError> {
    let builder = rayon::ThreadPoolBuilder::new().num_threads(threads);
    builder.build().map_err(|error| DataError::Threads {
        count: threads,
        message: error.to_string(),
    })
}

/// The order in which windows are written.
fn order(corpus: &Corpus) -> Order {
    match corpus.shuffle {
        true => Order::Any,
        false => Order::Files,
    }
}

fn make(
    corpus: &Corpus,
    part: &CorpusPart,
    claim: &Claim,
    path: &std::path::Path,
    threads: usize,
) -> Result<(), DataError> {
    let pool = pool(threads)?;
    let header = Header {
        key: part.key,
        elem_bytes: elem_bytes(corpus.ids_end(part)),
        ..Header::default()
    };
    let mut writer = TokenFileWriter::new(claim.file(), path, header)?;
    let mut making = Making {
        corpus,
        pool,
        batch: Vec::new(),
        batch_bytes: 0,
        packer: Packer::new(
            &mut writer,
            corpus.packing,
            corpus.seq_len,
            corpus.tokenizer.padding(),
            order(corpus),
            corpus.cross_document_attention,
            corpus.some_count(part),
        ),
    };
    let total = (part.found.sources.iter())
        .map(|source| source.bytes * passes(part.entries[source.entry].weight))
        .sum();
    let mut work = Progress::new("tokenizing", Unit::Bytes, Audience::Person).with_total(total);
    let any_bytes = matches!(corpus.tokenizer, Tokenizer::Bytes);
    let mut kind = None;
    let mut before: Option<Whole> = None;
    let mut skipped = Findings::default();
    // Number of the entry's first document.
    let mut first = 0;
    for (number, entry) in part.entries.iter().enumerate() {
        let mut used = 0;
        // Copies of a document are apart from each other, because the whole entry is read again for each.
        for pass in 0..passes(entry.weight) {
            let mut index = 0;
            used = 0;
            let mut wanted = None;
            let sources = part.found.sources.iter();
            for source in sources.filter(|source| source.entry == number) {
                let mut bad = |place: DocumentPosition, message: String| {
                    if corpus.on_bad_record == OnBadRecord::Error {
                        return Err(DataError::Record { place, message });
                    }
                    // Other passes would count it again.
                    if pass == 0 {
                        skipped.add(Finding::new(FindingKind::Records, true, message), &place);
                    }
                    Ok(())
                };
                let reading = Reading {
                    key: part.setting,
                    any_bytes,
                    bad: &mut bad,
                };
                let read = read::documents(source, reading, &mut kind, &mut |piece| {
                    work.add(piece.bytes);
                    if piece.after.is_none() {
                        if Some(index) == entry.max_samples {
                            return Err(DataError::Enough);
                        }
                        let copies = copies(index, entry.weight);
                        let held_out =
                            !part.by_tail() && is_held_out(first + used, part.validation_fraction);
                        // Documents for validation are used once.
                        let taken = copies > pass && (pass == 0 || !held_out);
                        wanted = taken.then_some(held_out);
                        index += 1;
                        used += u64::from(copies > 0);
                    }
                    let Some(held_out) = wanted else {
                        return Ok(());
                    };
                    // The following piece shows whether this one was its document's last.
                    let next = Whole {
                        ends: true,
                        piece,
                        held_out,
                    };
                    let starts = next.piece.after.is_none();
                    match before.replace(next) {
                        Some(whole) => making.add(Whole {
                            ends: starts,
                            ..whole
                        }),
                        None => Ok(()),
                    }
                });
                match read {
                    Err(DataError::Enough) => break,
                    other => other?,
                }
            }
        }
        first += used;
    }
    if let Some(whole) = before {
        making.add(whole)?;
    }
    making.tokenize()?;
    making.packer.finish()?;
    writer.findings().extend(&skipped);
    finish(corpus, part, writer)
}

fn finish(
    corpus: &Corpus,
    part: &CorpusPart,
    mut writer: TokenFileWriter<'_>,
) -> Result<(), DataError> {
    let findings = writer.findings().lines();
    let header = writer.header();
    let last_held = match part.by_tail() {
        false => 0,
        true => {
            let held_out = |elems: u64| (elems as f64 * part.validation_fraction) as u64;
            match corpus.packing {
                Packing::Concatenate => held_out(header.elems()),
                Packing::Documents => {
                    let stride = stride(corpus.packing, corpus.seq_len);
                    held_out(header.elems() / stride) * stride
                }
            }
        }
    };
    let held_out = [
        (
            part.name,
            header.train_elems - last_held,
            header.counted - writer.held_counted(),
            true,
        ),
        (
            "validation text",
            header.held_elems + last_held,
            writer.held_counted(),
            corpus.evaluates && part.validation_fraction > 0.0,
        ),
    ];
    let documents = header.documents;
    for (name, elems, counted, needed) in held_out {
        // What counts in the end of a text is counted with the rest.
        let is_known = needed && (name == part.name || !part.by_tail());
        if is_known && corpus.some_count(part) && counted == 0 && documents > 0 {
            return Err(DataError::NothingCounts {
                part: name,
                findings: findings.join("; "),
            });
        }
        if needed && windows(corpus.packing, corpus.seq_len, elems) == 0 {
            return Err(too_short(corpus, name, elems));
        }
    }
    writer.finish(last_held)?;
    Ok(())
}

/// Documents on their way to the token file.
struct Making<'c, 'w, 'f> {
    corpus: &'c Corpus,
    pool: rayon::ThreadPool,
    batch: Vec<Whole>,
    batch_bytes: u64,
    packer: Packer<'w, 'f>,
}

impl Making<'_, '_, '_> {
    fn add(&mut self, whole: Whole) -> Result<(), DataError> {
        self.batch_bytes += whole.piece.bytes;
        self.batch.push(whole);
        if self.batch_bytes >= BATCH_BYTES || self.batch.len() >= BATCH_DOCUMENTS {
            self.tokenize()?;
        }
        Ok(())
    }

    /// Tokenizes the collected pieces and packs them in order.
    fn tokenize(&mut self) -> Result<(), DataError> {
        let batch = std::mem::take(&mut self.batch);
        self.batch_bytes = 0;
        let corpus = self.corpus;
        let encoded: Vec<Result<EncodedDocuments, String>> = self.pool.install(|| {
            let pieces = batch.par_iter().map(|Whole { piece, ends, .. }| {
                let Piece {
                    document, after, ..
                } = piece;
                (corpus.tokenizer).encode(document, after.as_deref(), *ends, corpus.encoding)
            });
            pieces.collect()
        });
        for (
            Whole {
                piece,
                ends,
                held_out,
            },
            encoded,
        ) in batch.into_iter().zip(encoded)
        {
            let place = &piece.place;
            let is_record = piece.records.is_some();
            let EncodedDocuments {
                documents,
                findings,
            } = match encoded {
                Ok(encoded) => encoded,
                Err(message) if is_record && corpus.on_bad_record == OnBadRecord::Skip => {
                    let finding = Finding::new(FindingKind::Records, true, message);
                    self.packer.writer().findings().add(finding, place);
                    continue;
                }
                Err(message) => {
                    return Err(DataError::Record {
                        place: piece.place,
                        message,
                    });
                }
            };
            let found = self.packer.writer().findings();
            for finding in findings {
                found.add(finding, place);
            }
            let (last, earlier) = documents.split_last().expect("at least one document");
            if is_record && last.len() > 1 {
                let is_wrong =
                    earlier.is_empty() && last[1..].iter().all(|id| id & NOT_COUNTED != 0);
                found.add(
                    Finding::new(FindingKind::Documents, is_wrong, String::new()),
                    place,
                );
            }
            for ids in earlier {
                self.packer.begin(held_out, place);
                self.packer.writer().repeated();
                self.packer.add(ids)?;
                self.packer.end()?;
            }
            if piece.after.is_none() {
                self.packer.begin(held_out, place);
                if piece.document.is_unanswered() {
                    self.packer.writer().unanswered();
                }
            }
            self.packer.add(last)?;
            if ends {
                self.packer.end()?;
            }
        }
        Ok(())
    }
}

/// Number of times that a file of this weight is read.
fn passes(weight: f64) -> u64 {
    weight.ceil() as u64
}

/// Number of times that document number `index` of a file of this weight is used. The numbers are spread evenly,
/// like those of [`is_held_out`].
fn copies(index: u64, weight: f64) -> u64 {
    let upto = |count: u64| (count as f64 * weight).floor() as u64;
    upto(index + 1) - upto(index)
}

/// Returns whether document number `index` is reserved for evaluation. Such documents are spread evenly,
/// because data is often sorted.
fn is_held_out(index: u64, share: f64) -> bool {
    let upto = |count: u64| (count as f64 * share).floor();
    upto(index + 1) > upto(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_validation_fraction_of_documents_is_reserved_and_spread() {
        let held_out: Vec<u64> = (0..100).filter(|index| is_held_out(*index, 0.05)).collect();
        assert_eq!(held_out, [19, 39, 59, 79, 99]);
        assert_eq!(
            (0..1000).filter(|index| is_held_out(*index, 0.3)).count(),
            300
        );
        assert!(!(0..100).any(|index| is_held_out(index, 0.0)));
    }

    #[test]
    fn a_weight_spreads_the_copies_of_documents() {
        let of = |weight: f64| -> Vec<u64> { (0..6).map(|index| copies(index, weight)).collect() };
        assert_eq!(of(1.0), [1, 1, 1, 1, 1, 1]);
        assert_eq!(of(0.5), [0, 1, 0, 1, 0, 1]);
        assert_eq!(of(2.5), [2, 3, 2, 3, 2, 3]);
        assert_eq!([0.5, 1.0, 2.5].map(passes), [1, 1, 3]);
    }
}
