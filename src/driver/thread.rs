//! The client's own thread: connections, timers and subscriptions need none of the caller's
//! runtime.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};

use super::calls::{Calls, Reply};
use super::subscriptions::keep_subscriptions;
use super::{Driver, Outgoing};
use crate::error::Error;
use crate::link::{Link, Subscriptions};

/// Says when the thread has ended.
pub(crate) type Ended = watch::Receiver<bool>;

/// What the thread runs.
pub(crate) struct Work<L, P> {
    pub(crate) driver: Arc<Driver>,
    pub(crate) calls: mpsc::UnboundedReceiver<Outgoing>,
    pub(crate) link: L,
    pub(crate) pubsub: P,
}

/// Starts the thread. It opens the connections with `open`, reports how that went, and works until
/// the client has ended. Dropping the value that it reports has to end the client.
pub(crate) async fn start<T, L, P, F>(
    open: impl FnOnce() -> F + Send + 'static,
) -> Result<(T, Ended), Error>
where
    T: Send + 'static,
    L: Link,
    P: Subscriptions,
    F: Future<Output = Result<(T, Work<L, P>), Error>>,
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
                    // A task, because the runtime looks at the sockets once more before it polls
                    // the future of `block_on`.
                    let ended = tokio::spawn(run(work)).await;
                    if ended.is_ok() {
                        failing.0 = None;
                    }
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

/// The most calls that are taken in before replies and timers are looked at again.
const AT_ONCE: usize = 1024;

async fn run(work: Work<impl Link, impl Subscriptions>) {
    let Work {
        driver,
        calls: mut outgoing,
        link,
        pubsub,
    } = work;
    let subscriptions = tokio::spawn(keep_subscriptions(Arc::clone(&driver), pubsub));
    let mut moved = std::pin::pin!(link.moved());
    let mut calls = Calls::new(link);
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
            () = calls.replied(&mut replies) => {
                let _ = driver.apply(|engine, now| {
                    for Reply { call, sent, outcome } in replies.drain(..) {
                        engine.handle_sending(call, driver.clock.time(sent));
                        engine.handle_reply(now, call, outcome);
                    }
                });
                calls.send();
            }
            _ = outgoing.recv_many(&mut submitted, AT_ONCE) => {
                for outgoing in submitted.drain(..) {
                    match outgoing {
                        Outgoing::Call(id, call) => calls.push(id, call),
                        Outgoing::Reconnect => {
                            if calls.link().leave_server() {
                                driver.server_left.notify_one();
                            }
                        }
                    }
                }
                calls.send();
            }
            () = &mut alarm => {
                let _ = driver.apply(|engine, now| engine.handle_timeout(now));
            }
            () = driver.alarm.notified() => {}
            () = &mut moved => {
                driver.server_left.notify_one();
                moved.set(calls.link().moved());
            }
        }
    }
    subscriptions.abort();
    let _ = subscriptions.await;
    calls.link().close().await;
}
