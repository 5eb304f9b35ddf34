//! The library against real servers, one module a subject.

#[path = "../support/mod.rs"]
mod support;

mod acl;
mod auto_traits;
mod cancellation;
mod connect;
mod crowd;
mod docs;
mod error_texts;
mod faults;
mod force_unlock;
mod force_unlock_turns;
mod forgotten;
mod fuzz;
mod guard;
mod hazards;
mod input;
mod lease;
mod load;
mod memory;
mod parked;
mod processes;
mod queue;
mod reentrancy;
mod reentry_lease;
mod refusals;
mod renewal;
mod replies;
mod run;
mod scripts;
mod self_wait;
mod settled;
mod shutdown;
mod silence;
mod subscription;
mod unfinished;
mod unlock;
mod waiting;
mod warning;
mod wire;
