//! What the tests share: real servers, and the peers that use them.

pub mod bench;
pub mod java;
pub mod log;
pub mod observe;
pub mod process;
pub mod proxy;
pub mod rewrite;
pub mod server;
