//! Requests as futures. Dropping one cancels the request.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::Driver;
use crate::engine::{Engine, Grant, Outcome, RequestId};
use crate::error::Error;
use crate::time::Time;

/// A request that its caller waits for.
#[must_use = "dropping it cancels the request"]
pub(crate) struct Pending<B> {
    driver: Arc<Driver>,
    /// `None` once it was polled.
    begin: Option<B>,
    /// `None` before that, once there is an outcome, and if the engine failed.
    id: Option<RequestId>,
}

/// What came of a request to acquire.
pub(crate) enum Acquisition {
    Granted(Grant),
    /// Another owner holds the lock.
    Contended,
}

impl<B: FnOnce(&mut Engine, Time) -> RequestId> Pending<B> {
    pub(super) fn new(driver: Arc<Driver>, begin: B) -> Self {
        Self {
            driver,
            begin: Some(begin),
            id: None,
        }
    }

    /// The outcome of any request but one to acquire.
    pub(crate) async fn outcome(mut self) -> Outcome {
        poll_fn(|cx| self.poll(cx)).await
    }

    /// The outcome of a request to acquire.
    pub(crate) async fn acquired(mut self) -> Result<Acquisition, Error> {
        poll_fn(|cx| self.poll_acquired(cx)).await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Outcome> {
        let polled = self.poll_any(cx);
        if polled.is_ready() {
            self.id = None;
        }
        polled
    }

    /// Begins the request, or looks for its outcome.
    fn poll_any(&mut self, cx: &mut Context<'_>) -> Poll<Outcome> {
        if let Some(begin) = self.begin.take() {
            let Some((id, polled)) = self.driver.begin(begin, cx.waker().clone()) else {
                return Poll::Ready(Outcome::Failed(Error::ClientFailed));
            };
            self.id = Some(id);
            return polled;
        }
        match self.id {
            Some(id) => self.driver.poll(id, cx),
            None => Poll::Ready(Outcome::Failed(Error::ClientFailed)),
        }
    }

    fn poll_acquired(&mut self, cx: &mut Context<'_>) -> Poll<Result<Acquisition, Error>> {
        loop {
            let outcome = std::task::ready!(self.poll_any(cx));
            let Some(id) = self.id else {
                return Poll::Ready(Err(Error::ClientFailed));
            };
            return Poll::Ready(match outcome {
                Outcome::Granted => {
                    self.id = None;
                    let claimed = self.driver.apply(|engine, now| engine.claim(now, id));
                    claimed
                        .unwrap_or(Err(Error::ClientFailed))
                        .map(Acquisition::Granted)
                }
                Outcome::Unclaimed => {
                    if self
                        .driver
                        .apply(|engine, now| engine.resume(now, id))
                        .is_none()
                    {
                        self.id = None;
                        return Poll::Ready(Err(Error::ClientFailed));
                    }
                    continue;
                }
                outcome => {
                    self.id = None;
                    match outcome {
                        Outcome::Contended => Ok(Acquisition::Contended),
                        Outcome::Failed(error) => Err(error),
                        other => unreachable!("no outcome of an acquire: {other:?}"),
                    }
                }
            });
        }
    }
}

impl<B> Drop for Pending<B> {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            self.driver.cancel(id);
        }
    }
}
