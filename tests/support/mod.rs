//! Shared by the tests: real servers, and the processes and proxies that use them.

pub mod bench;
pub mod java;
pub mod log;
pub mod observe;
pub mod process;
pub mod proxy;
pub mod rewrite;
pub mod sentinel;
pub mod server;
