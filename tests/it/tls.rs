//! TLS: servers with certificates of every kind, and what the errors say.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd};
use redis::cmd;
use redisson_lock::{Error, LockClient, Tls, TlsProblem};
use tokio::time::timeout;

use crate::support::process::{self, Worker, setting};
use crate::support::server::{Builder, Server, TlsFiles, unique, wait_until_async};

const LIMIT: Duration = Duration::from_secs(30);

/// A certificate authority.
struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate with its private key.
struct Certified {
    pem: String,
    key: String,
}

impl Authority {
    fn new() -> Self {
        Self::named("an authority")
    }

    fn named(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        let issuer = Issuer::new(params, key);
        Self { pem, issuer }
    }

    fn certify(&self, name: &str) -> Certified {
        self.certify_with(name, |_| {})
    }

    fn certify_with(&self, name: &str, set: impl FnOnce(&mut CertificateParams)) -> Certified {
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        set(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        Certified {
            pem: certificate.pem(),
            key: key.serialize_pem(),
        }
    }

    /// The settings of a client that trusts this authority alone.
    fn trusted(&self) -> Tls {
        Tls::new().ca_certificates(self.pem.clone())
    }

    /// A server with that certificate.
    fn serve(&self, certified: &Certified, asks_clients: bool) -> Server {
        self.builder(certified, asks_clients).start()
    }

    fn builder(&self, certified: &Certified, asks_clients: bool) -> Builder {
        Server::builder().tls(TlsFiles {
            certificate: certified.pem.clone(),
            key: certified.key.clone(),
            ca: self.pem.clone(),
            asks_clients,
        })
    }
}

async fn connect(server: &Server, tls: Tls) -> Result<LockClient, Error> {
    let url = server.tls_url("localhost");
    let connecting = LockClient::builder().tls(tls).connect(&url);
    timeout(LIMIT, connecting).await.expect("an outcome")
}

#[track_caller]
fn problem(outcome: Result<LockClient, Error>) -> Option<TlsProblem> {
    match outcome {
        Err(Error::Connection { error, .. }) => {
            assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
            error.tls_problem()
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn lock_unlock_wake_up_and_reconnect_over_tls() {
    let authority = Authority::new();
    let server = authority.serve(&authority.certify("localhost"), false);
    let one = connect(&server, authority.trusted()).await.unwrap();
    let other = connect(&server, authority.trusted()).await.unwrap();
    let name = unique("stock");
    let guard = one.lock(&name).lock().await.unwrap();
    let waiting = {
        let lock = other.lock(&name);
        tokio::spawn(async move { lock.lock().await })
    };
    wait_until_async("it waits", LIMIT, || async {
        other.stats().requests_waiting == 1
    })
    .await;
    guard.unlock().await.unwrap();
    let guard = timeout(LIMIT, waiting).await.unwrap().unwrap().unwrap();
    // Every connection is lost, and the next ones are over TLS, too.
    let mut redis = server.connection();
    for kind in ["normal", "pubsub"] {
        cmd("CLIENT")
            .arg(&["KILL", "TYPE", kind, "SKIPME", "yes"])
            .exec(&mut redis)
            .unwrap();
    }
    guard.unlock().await.unwrap();
    let guard = one.lock(&name).lock().await.unwrap();
    guard.unlock().await.unwrap();
    assert!(other.stats().reconnects > 0);
    one.shutdown().await.unwrap();
    other.shutdown().await.unwrap();
}

/// They name their master by its address.
#[tokio::test]
async fn sentinels_and_their_master_are_reached_over_tls() {
    let authority = Authority::new();
    let certified = authority.certify("localhost");
    let server = authority.serve(&certified, false);
    let url = server.tls_url("localhost");
    let port = url.rsplit(':').next().unwrap();
    let sentinel = authority
        .builder(&certified, false)
        .sentinel(format!("sentinel monitor main 127.0.0.1 {port} 2\n"))
        .start();
    let url = sentinel.tls_url("localhost");
    let url = format!("{}/main", url.replacen("rediss", "rediss+sentinel", 1));
    let connect = |tls| LockClient::builder().tls(tls).connect(&url);
    let refused = connect(authority.trusted()).await;
    assert_eq!(problem(refused), Some(TlsProblem::WrongName));
    let named = authority.trusted().server_name("localhost");
    let client = connect(named).await.unwrap();
    client.lock(unique("stock")).run(async {}).await.unwrap();
    let refused = connect(Authority::named("another").trusted()).await;
    assert_eq!(problem(refused), Some(TlsProblem::UnknownAuthority));
}

#[tokio::test]
async fn certificate_of_another_authority_is_named() {
    let authority = Authority::new();
    let server = authority.serve(&authority.certify("localhost"), false);
    // The second one has the same name, and another key.
    for other in [Authority::named("another authority"), Authority::new()] {
        let refused = connect(&server, other.trusted()).await;
        let text = refused.as_ref().unwrap_err().to_string();
        assert!(text.contains("Tls::ca_certificates"), "{text}");
        assert!(text.contains("localhost:"), "{text}");
        assert_eq!(problem(refused), Some(TlsProblem::UnknownAuthority));
    }
}

#[tokio::test]
async fn certificate_for_another_name_is_named_and_can_be_asked_for() {
    let authority = Authority::new();
    let server = authority.serve(&authority.certify("redis.internal"), false);
    let refused = connect(&server, authority.trusted()).await;
    let text = refused.as_ref().unwrap_err().to_string();
    assert!(text.contains("redis.internal"), "{text}");
    assert_eq!(problem(refused), Some(TlsProblem::WrongName));
    let named = authority.trusted().server_name("redis.internal");
    let client = connect(&server, named).await.unwrap();
    let guard = client.lock(unique("stock")).lock().await.unwrap();
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn address_is_checked_as_a_name_is() {
    let authority = Authority::new();
    let at = async |server: &Server| {
        let builder = LockClient::builder().tls(authority.trusted());
        builder.connect(&server.tls_url("127.0.0.1")).await
    };
    let server = authority.serve(&authority.certify("127.0.0.1"), false);
    assert!(at(&server).await.is_ok());
    let server = authority.serve(&authority.certify("localhost"), false);
    assert_eq!(problem(at(&server).await), Some(TlsProblem::WrongName));
}

#[tokio::test]
async fn certificate_out_of_its_time_is_named() {
    let authority = Authority::new();
    let old = authority.certify_with("localhost", |params| {
        params.not_before = date_time_ymd(2001, 1, 1);
        params.not_after = date_time_ymd(2002, 1, 1);
    });
    let refused = connect(&authority.serve(&old, false), authority.trusted()).await;
    assert_eq!(problem(refused), Some(TlsProblem::Expired));
    let early = authority.certify_with("localhost", |params| {
        params.not_before = date_time_ymd(4000, 1, 1);
        params.not_after = date_time_ymd(4001, 1, 1);
    });
    let refused = connect(&authority.serve(&early, false), authority.trusted()).await;
    assert_eq!(problem(refused), Some(TlsProblem::NotYetValid));
}

#[tokio::test]
async fn server_that_asks_for_a_certificate_of_the_client() {
    let (authority, other) = (Authority::new(), Authority::new());
    let server = authority.serve(&authority.certify("localhost"), true);
    let refused = connect(&server, authority.trusted()).await;
    let text = refused.as_ref().unwrap_err().to_string();
    assert!(text.contains("Tls::client_certificate"), "{text}");
    assert_eq!(problem(refused), Some(TlsProblem::Refused));
    let with = |certified: Certified| {
        let Certified { pem, key } = certified;
        authority.trusted().client_certificate(pem, key)
    };
    let refused = connect(&server, with(other.certify("app"))).await;
    assert_eq!(problem(refused), Some(TlsProblem::Refused));
    let client = connect(&server, with(authority.certify("app"))).await;
    let guard = client.unwrap().lock(unique("stock")).lock().await.unwrap();
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn server_without_tls_is_named_long_before_the_timeout() {
    let server = Server::start();
    let begun = Instant::now();
    let refused = LockClient::builder()
        .connect_timeout(LIMIT)
        .connect(&format!("rediss://localhost:{}", server.port()))
        .await;
    assert!(begun.elapsed() < LIMIT / 2, "{:?}", begun.elapsed());
    let text = refused.as_ref().unwrap_err().to_string();
    assert!(text.contains("does not speak TLS"), "{text}");
    assert!(!refused.as_ref().unwrap_err().is_retryable());
    assert_eq!(problem(refused), Some(TlsProblem::PlainText));
}

/// Whatever answers at a `rediss://` URL: user and password are sent over TLS only.
#[tokio::test]
async fn secrets_are_never_sent_in_plain_text() {
    for answer in [
        "+PONG\r\n",
        "-NOAUTH Authentication required.\r\n",
        "junk",
        "",
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (got, received) = mpsc::channel();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let got = got.clone();
                std::thread::spawn(move || {
                    let mut buffer = [0; 4096];
                    while let Ok(length @ 1..) = stream.read(&mut buffer) {
                        if got.send(buffer[..length].to_vec()).is_err() {
                            return;
                        }
                        let _ = stream.write_all(answer.as_bytes());
                    }
                });
            }
        });
        let refused = LockClient::builder()
            .connect_timeout(Duration::from_millis(500))
            .connect(&format!("rediss://alice:hidden7@127.0.0.1:{port}"))
            .await;
        assert!(refused.is_err());
        let all: Vec<u8> = received.try_iter().flatten().collect();
        assert!(!all.is_empty());
        for secret in ["alice", "hidden7", "HELLO", "AUTH"] {
            let mut words = all.windows(secret.len());
            assert!(!words.any(|word| word == secret.as_bytes()), "{secret}");
        }
    }
}

/// A server that takes the connection and does not answer is a timeout, as without TLS.
#[tokio::test]
async fn server_that_does_not_answer_is_a_timeout() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let refused = LockClient::builder()
        .connect_timeout(Duration::from_millis(300))
        .connect(&format!("rediss://127.0.0.1:{port}"))
        .await;
    assert!(matches!(refused, Err(Error::Timeout { .. })), "{refused:?}");
}

#[tokio::test]
async fn wrong_settings_are_refused_before_anything_is_sent() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let url = format!("rediss://{}", listener.local_addr().unwrap());
    let authority = Authority::new();
    let Certified { pem, key } = authority.certify("app");
    let other_key = authority.certify("app").key;
    for (tls, expected) in [
        (Tls::new().ca_certificates("no PEM"), "no certificate"),
        (Tls::new().ca_certificates(""), "no certificate"),
        (Tls::new().ca_certificates(key.clone()), "no certificate"),
        (
            Tls::new()
                .ca_certificates("-----BEGIN CERTIFICATE-----\n%\n-----END CERTIFICATE-----\n"),
            "the CA certificates",
        ),
        (
            authority
                .trusted()
                .client_certificate(pem.clone(), "no key"),
            "private key",
        ),
        (
            authority.trusted().client_certificate("", key.clone()),
            "the client's certificate",
        ),
        (
            authority
                .trusted()
                .client_certificate(pem.clone(), other_key),
            "the client's certificate",
        ),
        (authority.trusted().server_name("not a name"), "server name"),
        (authority.trusted().server_name(""), "server name"),
    ] {
        let builder = LockClient::builder().tls(tls);
        let shown = format!("{builder:?}");
        let refused = builder.connect(&url).await.unwrap_err();
        let text = format!("{refused} {refused:?} {shown}");
        assert!(
            matches!(refused, Error::InvalidConfig { setting: "tls", .. }),
            "{text}"
        );
        assert!(text.contains(expected), "{expected}: {text}");
        assert!(!text.contains("BEGIN"), "{text}");
    }
    // The settings say nothing about a connection in plain text.
    let plain = url.replacen("rediss", "redis", 1);
    let refused = LockClient::builder().tls(Tls::new()).connect(&plain).await;
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("rediss://"), "{text}");
    assert!(listener.accept().is_err(), "it has connected");
}

#[tokio::test]
async fn systems_certificates_are_trusted_by_default() {
    let authority = Authority::new();
    let server = authority.serve(&authority.certify("localhost"), false);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("roots.pem");
    std::fs::write(&file, &authority.pem).unwrap();
    let settings = [("URL", &*server.tls_url("localhost"))];
    let mut worker = Worker::start_with(
        "tls::worker_process",
        "connect",
        &settings,
        &[("SSL_CERT_FILE", file.to_str().unwrap())],
    );
    assert!(worker.ended(LIMIT).success());
}

#[tokio::test]
async fn worker_process() {
    if process::role().is_none() {
        return;
    }
    let client = LockClient::connect(&setting("URL")).await.unwrap();
    let guard = client.lock(unique("stock")).lock().await.unwrap();
    guard.unlock().await.unwrap();
}
