//! Requests to the owner thread: what it lends, its answers, and what must hold before a call.

use std::sync::mpsc::{RecvTimeoutError, TryRecvError};
use std::time::Instant;

use super::{INTERRUPT_STEP, Interrupt, Swapper};
use crate::SwapperError;
use crate::core::Request;
use crate::lease::{Lease, Message, Reply};
use crate::op::Op;
use crate::settings::StepIo;
use crate::span::{Span, SpanKind};

impl<H: Clone + Send + 'static> Swapper<H> {
    pub(super) fn serve<E: From<SwapperError>>(
        &mut self,
        op: Op,
        use_them: impl FnMut(&mut [Lease]) -> Result<(), E>,
    ) -> Result<(), E> {
        let start = Instant::now();
        let served = self.request(Request::Serve(op), None, None, use_them);
        if self.recording {
            let (kind, unit) = match op {
                Op::Gather { unit } => (SpanKind::Gather, unit),
                Op::Scatter { unit } => (SpanKind::Scatter, unit),
                // Fills and visits before the first step belong to no step.
                _ => return served.map(drop),
            };
            self.spans.push(Span {
                unit: Some(unit),
                ..Span::since(kind, start)
            });
        }
        served.map(drop)
    }

    /// Sends `request` and passes lent ranges to `use_them`, all available ones at a time, until it is served.
    pub(super) fn request<E: From<SwapperError>>(
        &mut self,
        request: Request,
        hyper: Option<H>,
        blob: Option<Vec<u8>>,
        mut use_them: impl FnMut(&mut [Lease]) -> Result<(), E>,
    ) -> Result<StepIo, E> {
        let scatters = matches!(request, Request::Serve(Op::Scatter { .. }));
        self.send(Message::Request {
            request,
            hyper,
            blob,
        })?;
        let mut lent: Vec<Lease> = Vec::new();
        loop {
            match self.reply(lent.is_empty()) {
                Ok(Some(Reply::Lend(more))) => lent.extend(more),
                Ok(Some(Reply::Done { io, spans })) => {
                    self.spans.append(spans);
                    let waited_ns = self.waited.as_nanos() as u64;
                    return Ok(StepIo { waited_ns, ..io });
                }
                Ok(Some(Reply::Failed(error))) => {
                    // An out-of-order request was refused without effect; every other error is final.
                    self.stopped = !matches!(error, SwapperError::OutOfOrder { .. });
                    return Err(error.into());
                }
                Ok(None) => {
                    if let Err(error) = use_them(&mut lent) {
                        // The pass cannot continue; its slots are freed when the owner ends.
                        self.stopped = true;
                        return Err(error);
                    }
                    let lent = std::mem::take(&mut lent);
                    self.send(Message::Returned(lent))?;
                }
                Err(error) => {
                    self.abandoned = true;
                    self.torn |= scatters;
                    // A tile that was written in part must not be used.
                    self.stopped |= self.filling.is_some();
                    return Err(error.into());
                }
            }
        }
    }

    /// The owner's next reply. Waits for it where `wait` is set, otherwise `None` says that there is none yet.
    ///
    /// # Errors
    /// [`SwapperError::Interrupted`], or [`SwapperError::Stopped`] when the owner has ended.
    fn reply(&mut self, wait: bool) -> Result<Option<Reply>, SwapperError> {
        match self.replies.try_recv() {
            Ok(reply) => return Ok(Some(reply)),
            Err(TryRecvError::Empty) if !wait => return Ok(None),
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => return Err(self.ended()),
        }
        let since = Instant::now();
        let reply = loop {
            match self.replies.recv_timeout(INTERRUPT_STEP) {
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(Interrupt(interrupt)) = &mut self.interrupt
                        && interrupt()
                    {
                        break Err(SwapperError::Interrupted);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => break Err(self.ended()),
                Ok(reply) => break Ok(Some(reply)),
            }
        };
        self.waited += since.elapsed();
        if self.recording {
            self.spans.push(Span::since(SpanKind::Wait, since));
        }
        reply
    }

    fn ended(&mut self) -> SwapperError {
        self.stopped = true;
        SwapperError::Stopped
    }

    /// Waits for the end of a request that was interrupted. What it lends goes back unused.
    fn finish_abandoned(&mut self) -> Result<(), SwapperError> {
        while self.abandoned {
            match self.reply(true)? {
                Some(Reply::Lend(lent)) => self.send(Message::Returned(lent))?,
                Some(Reply::Done { spans, .. }) => {
                    self.spans.append(spans);
                    self.abandoned = false;
                }
                Some(Reply::Failed(error)) => {
                    self.stopped = true;
                    return Err(error);
                }
                None => unreachable!("it waits"),
            }
        }
        Ok(())
    }

    pub(super) fn send(&mut self, message: Message<H>) -> Result<(), SwapperError> {
        self.inbox.send(message).map_err(|_| {
            self.stopped = true;
            // The owner reports why before it ends.
            while let Ok(reply) = self.replies.try_recv() {
                if let Reply::Failed(error) = reply {
                    return error;
                }
            }
            SwapperError::Stopped
        })
    }

    pub(super) fn check_running(&mut self) -> Result<(), SwapperError> {
        if self.stopped {
            return Err(SwapperError::Stopped);
        }
        self.finish_abandoned()
    }

    /// Every call begins with this.
    pub(super) fn check(&mut self) -> Result<(), SwapperError> {
        self.check_running()?;
        match self.filling {
            Some(_) => Err(SwapperError::Program {
                what: "units are being filled: end that first".into(),
            }),
            None => Ok(()),
        }
    }

    pub(super) fn check_initialized(&mut self) -> Result<(), SwapperError> {
        self.check()?;
        match self.initialized {
            true => Ok(()),
            false => Err(SwapperError::NotInitialized),
        }
    }

    /// Refuses what would see or lose a part of a step.
    pub(super) fn check_finished(&self) -> Result<(), SwapperError> {
        let what = match (self.begun.is_empty(), self.revised) {
            (true, false) => return Ok(()),
            (_, true) => {
                "a step that changed optimizer state was not finished: start again, which resumes after the last commit"
            }
            (false, _) => "updates of this step have begun: finish it first",
        };
        Err(SwapperError::Program { what: what.into() })
    }

    pub(super) fn check_whole(&self) -> Result<(), SwapperError> {
        if self.torn {
            return Err(SwapperError::Program {
                what: "a scatter of this step was interrupted: begin the step again".into(),
            });
        }
        Ok(())
    }
}
