//! A proxy that changes replies: what another server would answer.

#![allow(dead_code)]

use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::{TcpListener, TcpStream};

/// Starts the proxy in front of the server on this port, and returns its address. It lives as long
/// as the runtime.
pub async fn rewriting(
    port: u16,
    rewrite: impl Fn(String) -> String + Send + Sync + 'static,
) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let rewrite = Arc::new(rewrite);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let rewrite = Arc::clone(&rewrite);
            tokio::spawn(async move {
                let mut server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
                let (mut from_client, mut to_client) = client.split();
                let (mut from_server, mut to_server) = server.split();
                let replies = async {
                    let mut buffer = vec![0; 65_536];
                    while let Ok(length @ 1..) = from_server.read(&mut buffer).await {
                        let reply = String::from_utf8_lossy(&buffer[..length]).into_owned();
                        if to_client
                            .write_all(rewrite(reply).as_bytes())
                            .await
                            .is_err()
                        {
                            return;
                        }
                    }
                };
                // An error means that the client has closed the connection.
                let _ = tokio::join!(copy(&mut from_client, &mut to_server), replies);
            });
        }
    });
    address
}
