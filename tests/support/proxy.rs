//! A proxy between a client and a server that fails the way networks do, when a test says so.

// Every test binary includes this module and uses a part of it.
#![allow(dead_code)]

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use super::server::Server;

/// A way to a server. Dropping it closes every connection that goes through it.
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

/// How bytes travel in one direction, on all connections, those to come included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    Pass,
    /// Later by this much, read by read.
    Delay(Duration),
    /// Not at all, until another flow is set. Then all that was held arrives, also what was sent on
    /// a connection that its client has closed since: TCP sends such bytes again when the network
    /// is back.
    Hold,
}

/// A direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Requests,
    Replies,
    Both,
}

/// What becomes of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It is lost, and the connection goes on: every later reply takes the place of the one before
    /// it.
    Swallow,
    /// It is lost, with its connection.
    Close,
    /// So many of its bytes arrive, at most all; then the connection is closed.
    CloseAt(usize),
}

impl Proxy {
    /// A way to that server, which may be restarted behind it.
    pub async fn start(server: &Server) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port for the proxy");
        let port = listener.local_addr().expect("the proxy's address").port();
        let shared = Arc::new(Shared {
            server: server.port(),
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

    /// Sets how bytes travel from now on.
    pub fn set(&self, way: Way, flow: Flow) {
        if way != Way::Replies {
            self.shared.requests.send_replace(flow);
        }
        if way != Way::Requests {
            self.shared.replies.send_replace(flow);
        }
    }

    /// Holds the requests on the connections that are open now; new connections are not affected.
    /// So it is when a path fails and another takes over, while TCP waits longer and longer before
    /// it sends again on the old one.
    pub fn stall(&self) {
        self.shared
            .stalled
            .send_replace(self.shared.opened.load(Ordering::Acquire));
    }

    /// Delivers what was stalled, also what was sent on a connection that its client has closed
    /// since.
    pub fn deliver(&self) {
        self.shared.stalled.send_replace(0);
    }

    /// Lets this happen to the reply of the next request that contains every one of the parts. The
    /// request itself reaches the server.
    pub fn next_reply_to(&self, parts: &[&str], fate: Fate) {
        let parts = parts.iter().map(|part| part.as_bytes().to_vec()).collect();
        self.shared.rules.lock().unwrap().push(Rule { parts, fate });
    }

    /// Lets nothing more happen to replies that were to meet a fate and have not yet.
    pub fn no_more_fates(&self) {
        self.shared.rules.lock().unwrap().clear();
    }

    /// How many replies have met their fate.
    pub fn applied(&self) -> usize {
        self.shared.applied.load(Ordering::Acquire)
    }

    /// How often anything has been done to anybody here: bytes held or delayed, a request whose
    /// reply is to meet a fate, a connection closed.
    pub fn touched(&self) -> usize {
        self.shared.touched.load(Ordering::Acquire)
    }

    /// How many replies said that the server is busy with a script or has no memory.
    pub fn refused(&self) -> usize {
        self.shared.refused.load(Ordering::Acquire)
    }

    /// Closes every connection, with what it held.
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
    server: u16,
    requests: watch::Sender<Flow>,
    replies: watch::Sender<Flow>,
    /// Requests are held on the connections with a lower number.
    stalled: watch::Sender<usize>,
    /// How many connections there have been.
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

    /// The fate of this request's reply, if a rule waits for such a request. Each rule serves once.
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

/// What is to become of the replies that are still to come on a connection, in their order.
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

/// Carries one connection until the server or a rule ends it.
async fn carry(shared: Arc<Shared>, client: TcpStream, number: usize) {
    // A server that is down looks like one that hangs up.
    let Ok(server) = TcpStream::connect(("127.0.0.1", shared.server)).await else {
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
        // The client has hung up; the server will, when it has read everything.
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
            let says = |word: &[u8]| frame.windows(word.len()).any(|part| part == word);
            if frame.starts_with(b"-BUSY ") || says(b"OOM command not allowed") {
                shared.refused.fetch_add(1, Ordering::AcqRel);
            }
            // A push message is nobody's reply.
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

/// Waits until bytes may go on.
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

/// The length of the RESP value (<https://redis.io/docs/latest/develop/reference/protocol-spec/>)
/// at the beginning, if all of it is there.
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
