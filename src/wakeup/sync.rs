//! What the queues are synchronised with, and the clock that they go by. `tests/interleavings` puts
//! a model checker's in their place.

pub(crate) use parking_lot::Mutex;
pub(crate) use tokio::sync::Notify;
pub(crate) use tokio::time::Instant;
