//! Recipe: an HTTP handler that changes one order at a time, whichever process serves the request.
//! `docs/recipes.md` explains it.
//!
//! ```sh
//! cargo run --package redisson-lock-examples --example axum_handler
//! curl -X POST http://127.0.0.1:3000/orders/42/confirm
//! ```

use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use redisson_lock::{Error, LockClient};

// region: handler
/// Confirms an order. A second request for the same order waits for two seconds at most.
async fn confirm(State(locks): State<LockClient>, Path(id): Path<u64>) -> Result<String, Refused> {
    let lock = locks.lock(format!("order:{id}"));
    let confirmed = lock
        .lock()
        .timeout(Duration::from_secs(2))
        .run(async move { format!("order {id} confirmed") })
        .await?;
    Ok(confirmed)
}

/// A lock error as an HTTP status.
struct Refused(Error);

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let (status, text) = match &self.0 {
            // Another request had the order for two seconds.
            Error::AcquireTimeout { .. } => (StatusCode::CONFLICT, "the order is being changed"),
            // The lock server cannot be used now. The order was not touched.
            error if error.is_retryable() => (StatusCode::SERVICE_UNAVAILABLE, "try again later"),
            // `Error::Lost`: the work was stopped half-way. The others are bugs or bad settings.
            _ => (
                StatusCode::INTERNAL_SERVER_ERROR,
                "the order was not confirmed",
            ),
        };
        // The error names the lock and the server: it is for the log, not for the caller.
        eprintln!("{status}: {}", self.0);
        (status, text).into_response()
    }
}

/// One client for the whole process: each clone is the same client.
pub fn app(locks: LockClient) -> Router {
    Router::new()
        .route("/orders/{id}/confirm", post(confirm))
        .with_state(locks)
}
// endregion

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    let locks = LockClient::builder()
        .client_name("orders")
        .connect_retry(Duration::from_secs(30))
        .connect(&url)
        .await?;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, app(locks.clone()))
        .with_graceful_shutdown(async {
            // An error means that there are no signals here: the service runs until it is killed.
            if tokio::signal::ctrl_c().await.is_err() {
                std::future::pending::<()>().await;
            }
        })
        .await?;
    locks.shutdown().await?;
    Ok(())
}
