//! The client's own thread: connections, timers and subscriptions need none of the caller's
//! runtime.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::sync::{mpsc, oneshot, watch};

use super::subscriptions::keep_subscriptions;
use super::{Driver, Outgoing};
use crate::error::Error;
use crate::link::{Link, PubSub};

/// Says when the thread has ended.
pub(crate) type Ended = watch::Receiver<bool>;

/// What the thread runs.
pub(crate) struct Work {
    pub(crate) driver: Arc<Driver>,
    pub(crate) calls: mpsc::UnboundedReceiver<Outgoing>,
    pub(crate) link: Link,
    pub(crate) pubsub: PubSub,
}

/// Starts the thread. It opens the connections with `open`, reports how that went, and works until
/// the client has ended. Dropping the value that it reports has to end the client.
pub(crate) async fn start<T, F>(
    open: impl FnOnce() -> F + Send + 'static,
) -> Result<(T, Ended), Error>
where
    T: Send + 'static,
    F: Future<Output = Result<(T, Work), Error>>,
{
    let (mut report, reported) = oneshot::channel();
    let (ended, has_ended) = watch::channel(false);
    let thread = std::thread::Builder::new().name("redisson-lock".into());
    // A subscriber that the caller has set for its own scope gets the thread's events, too.
    let dispatch = tracing::dispatcher::get_default(Clone::clone);
    let body = move || {
        let _subscriber = tracing::dispatcher::set_default(&dispatch);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let runtime = match runtime {
            Ok(runtime) => runtime,
            Err(error) => {
                let _ = report.send(Err(thread_error(&error)));
                return;
            }
        };
        runtime.block_on(async move {
            let opened = tokio::select! {
                opened = open() => opened,
                // The caller has gone.
                () = report.closed() => return,
            };
            match opened {
                Ok((value, work)) => {
                    let driver = Arc::clone(&work.driver);
                    // If the caller has gone, dropping the value ends the client.
                    let _ = report.send(Ok(value));
                    let mut failing = FailOnDrop(Some(driver));
                    run(work).await;
                    failing.0 = None;
                }
                Err(error) => drop(report.send(Err(error))),
            }
        });
        // Tasks and connections end with the runtime.
        runtime.shutdown_timeout(Duration::from_millis(500));
        ended.send_replace(true);
    };
    if let Err(error) = thread.spawn(body) {
        return Err(thread_error(&error));
    }
    match reported.await {
        Ok(outcome) => outcome.map(|value| (value, has_ended)),
        // The thread panicked while it connected.
        Err(_) => Err(Error::ClientFailed),
    }
}

fn thread_error(error: &std::io::Error) -> Error {
    Error::InvalidConfig {
        setting: "thread",
        problem: format!("the client's thread could not be started: {error}"),
        allowed: "one more thread",
    }
}

/// If the thread panics, no request is left without an answer.
struct FailOnDrop(Option<Arc<Driver>>);

impl Drop for FailOnDrop {
    fn drop(&mut self) {
        if let Some(driver) = &self.0 {
            let _ = driver.apply(|engine, _| engine.fail());
        }
    }
}

/// From so many calls in flight on, further ones wait here, where no time limit of a reply counts:
/// the server runs one after the other.
const WINDOW: usize = 1024;

async fn run(work: Work) {
    let Work {
        driver,
        mut calls,
        link,
        pubsub,
    } = work;
    let subscriptions = tokio::spawn(keep_subscriptions(Arc::clone(&driver), pubsub));
    let mut in_flight = FuturesUnordered::new();
    let mut submitted = Vec::new();
    let mut replies = Vec::new();
    let far = tokio::time::Instant::now() + Duration::from_secs(1 << 30);
    let mut alarm = std::pin::pin!(tokio::time::sleep_until(far));
    while !driver.has_ended() {
        let at = driver.arm().map_or(far, |at| driver.clock.instant(at));
        if alarm.deadline() != at {
            alarm.as_mut().reset(at);
        }
        tokio::select! {
            Some(reply) = in_flight.next(), if !in_flight.is_empty() => {
                replies.push(reply);
                // Those that came with it are taken in at once.
                while let Some(Some(reply)) = futures::FutureExt::now_or_never(in_flight.next()) {
                    replies.push(reply);
                }
                let replies = std::mem::take(&mut replies);
                let _ = driver.apply(|engine, now| {
                    for (id, outcome) in replies {
                        engine.handle_reply(now, id, outcome);
                    }
                });
            }
            _ = calls.recv_many(&mut submitted, WINDOW), if in_flight.len() < WINDOW => {
                for outgoing in submitted.drain(..) {
                    match outgoing {
                        Outgoing::Call(id, call) => {
                            let call = link.call(call);
                            in_flight.push(async move { (id, call.await) });
                        }
                        Outgoing::Reconnect => {
                            if link.leave_server() {
                                driver.server_left.notify_one();
                            }
                        }
                    }
                }
            }
            () = &mut alarm => {
                let _ = driver.apply(|engine, now| engine.handle_timeout(now));
            }
            () = driver.alarm.notified() => {}
        }
    }
    subscriptions.abort();
    let _ = subscriptions.await;
    link.close().await;
}
