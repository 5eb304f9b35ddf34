//! A proxy between a client and a server. Tests use it to inject faults of a network.

// Each test binary includes this module and uses a part of it.
#![allow(dead_code)]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use super::server::Server;

/// A proxy for one server. Dropping it closes all its connections.
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

/// How the proxy passes bytes on in one direction, on all present and future connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// At once.
    Pass,
    /// Each chunk that was read is delayed by this time.
    Delay(Duration),
    /// Not before another flow is set. Then all held bytes are delivered, also those of connections
    /// that the client has closed since: TCP retransmits such bytes when the network works again.
    Hold,
}

/// A direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Requests,
    Replies,
    Both,
}

/// A fault for a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// The reply is lost and the connection stays open: the client takes each later reply for the
    /// reply to the call before.
    Swallow,
    /// The reply is lost, and the connection is closed.
    Close,
    /// The first bytes of the reply arrive, at most this number; then the connection is closed.
    CloseAt(usize),
}

impl Proxy {
    /// Starts a proxy for the server. The server may be restarted while the proxy runs.
    pub async fn start(server: &Server) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port for the proxy");
        let port = listener.local_addr().expect("the proxy's address").port();
        let shared = Arc::new(Shared {
            server: AtomicU16::new(server.port()),
            requests: watch::channel(Flow::Pass).0,
            replies: watch::channel(Flow::Pass).0,
            stalled: watch::channel(0).0,
            opened: AtomicUsize::new(0),
            rules: Mutex::default(),
            applied: AtomicUsize::new(0),
            touched: AtomicUsize::new(0),
            refused: AtomicUsize::new(0),
            connections: Mutex::default(),
        });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Self {
            port,
            shared,
            accepting,
        }
    }

    /// The URL for clients.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Connects new connections to another server. Those that are open stay with theirs, as behind
    /// an address that moves in a fail-over.
    pub fn retarget(&self, server: &Server) {
        self.shared.server.store(server.port(), Ordering::Release);
    }

    /// Sets how bytes are passed on from now on.
    pub fn set(&self, way: Way, flow: Flow) {
        if way != Way::Replies {
            self.shared.requests.send_replace(flow);
        }
        if way != Way::Requests {
            self.shared.replies.send_replace(flow);
        }
    }

    /// Holds the requests on the connections that are open now. New connections are not affected.
    /// This happens in a network when one path fails and another replaces it, while TCP waits with
    /// growing pauses before it retransmits on the old connections.
    pub fn stall(&self) {
        self.shared
            .stalled
            .send_replace(self.shared.opened.load(Ordering::Acquire));
    }

    /// Delivers the stalled requests, also those of connections that the client has closed since.
    pub fn deliver(&self) {
        self.shared.stalled.send_replace(0);
    }

    /// Applies a fault to the reply to the next request that contains all the parts. The request
    /// itself reaches the server.
    pub fn next_reply_to(&self, parts: &[&str], fate: Fate) {
        let parts = parts.iter().map(|part| part.as_bytes().to_vec()).collect();
        self.shared.rules.lock().unwrap().push(Rule { parts, fate });
    }

    /// Removes all faults that have not been applied yet.
    pub fn no_more_fates(&self) {
        self.shared.rules.lock().unwrap().clear();
    }

    /// The number of replies to which a fault was applied.
    pub fn applied(&self) -> usize {
        self.shared.applied.load(Ordering::Acquire)
    }

    /// The number of interventions: bytes held or delayed, a request whose reply gets a fault, a
    /// connection closed.
    pub fn touched(&self) -> usize {
        self.shared.touched.load(Ordering::Acquire)
    }

    /// The number of replies that report that the server is busy with a script or out of memory.
    pub fn refused(&self) -> usize {
        self.shared.refused.load(Ordering::Acquire)
    }

    /// Closes all connections. Held bytes are lost.
    pub fn close_now(&self) {
        let mut connections = self.shared.connections.lock().unwrap();
        while connections.try_join_next().is_some() {}
        self.shared
            .touched
            .fetch_add(connections.len(), Ordering::AcqRel);
        connections.abort_all();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.close_now();
    }
}

struct Shared {
    server: AtomicU16,
    requests: watch::Sender<Flow>,
    replies: watch::Sender<Flow>,
    /// Requests are held on connections with a lower number.
    stalled: watch::Sender<usize>,
    /// The number of connections so far.
    opened: AtomicUsize,
    rules: Mutex<Vec<Rule>>,
    applied: AtomicUsize,
    touched: AtomicUsize,
    refused: AtomicUsize,
    connections: Mutex<JoinSet<()>>,
}

struct Rule {
    parts: Vec<Vec<u8>>,
    fate: Fate,
}

impl Shared {
    fn touch(&self) {
        self.touched.fetch_add(1, Ordering::AcqRel);
    }

    /// The fault for the reply to this request, if a rule matches the request. Each rule applies
    /// once.
    fn fate_of(&self, request: &[u8]) -> Option<Fate> {
        let contains = |part: &Vec<u8>| request.windows(part.len()).any(|window| window == part);
        let mut rules = self.rules.lock().unwrap();
        let at = rules
            .iter()
            .position(|rule| rule.parts.iter().all(contains))?;
        self.touch();
        Some(rules.remove(at).fate)
    }
}

/// The faults for the pending replies of a connection, in their order.
type Expected = Mutex<VecDeque<Option<Fate>>>;

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((client, _)) = listener.accept().await {
        let number = shared.opened.fetch_add(1, Ordering::AcqRel);
        let carried = carry(Arc::clone(&shared), client, number);
        let mut connections = shared.connections.lock().unwrap();
        while connections.try_join_next().is_some() {}
        connections.spawn(carried);
    }
}

/// Passes the bytes of one connection on until the server or a rule closes it.
async fn carry(shared: Arc<Shared>, client: TcpStream, number: usize) {
    // If the server does not run, the client's connection is closed.
    let port = shared.server.load(Ordering::Acquire);
    let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await else {
        return;
    };
    for stream in [&client, &server] {
        stream.set_nodelay(true).expect("no delay");
    }
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let expected = Expected::default();
    let requests = async {
        carry_requests(&shared, number, &expected, from_client, to_server).await;
        // The client has closed the connection. The server closes it after it has read everything.
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = requests => {}
        () = carry_replies(&shared, &expected, from_server, to_client) => {}
    }
}

async fn carry_requests(
    shared: &Shared,
    number: usize,
    expected: &Expected,
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
) {
    let mut flow = shared.requests.subscribe();
    let mut stalled = shared.stalled.subscribe();
    let mut buffer = Vec::new();
    while matches!(from.read_buf(&mut buffer).await, Ok(1..)) {
        let mut at = 0;
        while let Some(length) = frame_length(&buffer[at..]) {
            expected
                .lock()
                .unwrap()
                .push_back(shared.fate_of(&buffer[at..at + length]));
            at += length;
        }
        gate(shared, &mut flow).await;
        if number < *stalled.borrow() {
            shared.touch();
        }
        if stalled
            .wait_for(|stalled| number >= *stalled)
            .await
            .is_err()
        {
            return;
        }
        if to.write_all(&buffer[..at]).await.is_err() {
            return;
        }
        buffer.drain(..at);
    }
}

async fn carry_replies(
    shared: &Shared,
    expected: &Expected,
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
) {
    let mut flow = shared.replies.subscribe();
    let mut buffer = Vec::new();
    while matches!(from.read_buf(&mut buffer).await, Ok(1..)) {
        let (mut at, mut passed, mut closing) = (0, Vec::new(), false);
        while let Some(length) = frame_length(&buffer[at..]) {
            let frame = &buffer[at..at + length];
            at += length;
            let contains = |word: &[u8]| frame.windows(word.len()).any(|part| part == word);
            if frame.starts_with(b"-BUSY ") || contains(b"OOM command not allowed") {
                shared.refused.fetch_add(1, Ordering::AcqRel);
            }
            // A push message is not a reply.
            let fate = if frame[0] == b'>' {
                None
            } else {
                expected.lock().unwrap().pop_front().flatten()
            };
            match fate {
                None => passed.extend_from_slice(frame),
                Some(fate) => {
                    shared.applied.fetch_add(1, Ordering::AcqRel);
                    if let Fate::CloseAt(bytes) = fate {
                        passed.extend_from_slice(&frame[..bytes.min(length)]);
                    }
                    closing = fate != Fate::Swallow;
                }
            }
            if closing {
                break;
            }
        }
        buffer.drain(..at);
        gate(shared, &mut flow).await;
        if to.write_all(&passed).await.is_err() || closing {
            return;
        }
    }
}

/// Waits until the flow lets bytes pass.
async fn gate(shared: &Shared, flow: &mut watch::Receiver<Flow>) {
    loop {
        let now = *flow.borrow_and_update();
        if now != Flow::Pass {
            shared.touch();
        }
        match now {
            Flow::Pass => return,
            Flow::Delay(by) => return tokio::time::sleep(by).await,
            Flow::Hold => {
                if flow.changed().await.is_err() {
                    return;
                }
            }
        }
    }
}

/// The length of the RESP value at the beginning of the data, if it is complete
/// (<https://redis.io/docs/latest/develop/reference/protocol-spec/>).
fn frame_length(data: &[u8]) -> Option<usize> {
    let line = data.windows(2).position(|pair| pair == b"\r\n")?;
    let head = line + 2;
    let count = || {
        std::str::from_utf8(&data[1..line])
            .ok()?
            .parse::<i64>()
            .ok()
    };
    match data[0] {
        b'$' | b'!' | b'=' => {
            let Ok(length) = usize::try_from(count()?) else {
                return Some(head);
            };
            let end = head + length + 2;
            (end <= data.len()).then_some(end)
        }
        kind @ (b'*' | b'~' | b'>' | b'%') => {
            let items = usize::try_from(count()?).unwrap_or(0) * if kind == b'%' { 2 } else { 1 };
            (0..items).try_fold(head, |at, _| Some(at + frame_length(&data[at..])?))
        }
        _ => Some(head),
    }
}
