//! What the queues are synchronised with. `tests/interleavings` puts a model checker's in its place.

pub(crate) use parking_lot::Mutex;
pub(crate) use tokio::sync::Notify;
