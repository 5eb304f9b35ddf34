//! Requests as futures. Dropping one cancels the request.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::Driver;
use crate::engine::{Grant, Outcome, RequestId};
use crate::error::Error;

/// A request that its caller waits for.
#[must_use = "dropping it cancels the request"]
pub(crate) struct Pending {
    driver: Arc<Driver>,
    /// `None` once there is an outcome, or if the engine failed.
    id: Option<RequestId>,
}

/// What came of a request to acquire.
pub(crate) enum Acquisition {
    Granted(Grant),
    /// Another owner holds the lock.
    Contended,
}

impl Pending {
    pub(super) fn new(driver: Arc<Driver>, id: Option<RequestId>) -> Self {
        Self { driver, id }
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
        let Some(id) = self.id else {
            return Poll::Ready(Outcome::Failed(Error::ClientFailed));
        };
        let polled = self.driver.poll(id, cx);
        if polled.is_ready() {
            self.id = None;
        }
        polled
    }

    fn poll_acquired(&mut self, cx: &mut Context<'_>) -> Poll<Result<Acquisition, Error>> {
        let Some(id) = self.id else {
            return Poll::Ready(Err(Error::ClientFailed));
        };
        loop {
            return Poll::Ready(match std::task::ready!(self.driver.poll(id, cx)) {
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

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            self.driver.cancel(id);
        }
    }
}
