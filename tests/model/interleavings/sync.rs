//! The scheduler's primitives, in the shape of those in `src/wakeup/sync.rs`.

use std::task::{Poll, Waker};

use shuttle::sync::MutexGuard;

pub use super::clock::Instant;

/// As `parking_lot::Mutex`.
pub struct Mutex<T>(shuttle::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap()
    }
}

/// As `tokio::sync::Notify` for one who waits: it keeps one permit.
pub struct Notify(Mutex<(bool, Option<Waker>)>);

impl Notify {
    pub fn new() -> Self {
        Self(Mutex::new((false, None)))
    }

    pub fn notify_one(&self) {
        let waker = {
            let mut state = self.0.lock();
            state.0 = true;
            state.1.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub async fn notified(&self) {
        std::future::poll_fn(|cx| {
            let mut state = self.0.lock();
            if std::mem::take(&mut state.0) {
                return Poll::Ready(());
            }
            state.1 = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }
}
