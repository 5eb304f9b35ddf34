//! TLS as the client library takes it, and servers that do not speak it.

use std::sync::Arc;
use std::time::Duration;

use fred::rustls::pki_types::pem::PemObject;
use fred::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use fred::rustls::{ClientConfig, RootCertStore, crypto};
use fred::types::config::TlsConnector;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::error::Error;
use crate::tls::Tls;

/// Reads the certificates, the system's unless there are others.
pub(super) fn connector(tls: &Tls) -> Result<TlsConnector, Error> {
    let roots = match &tls.roots {
        Some(pem) => given(pem)?,
        None => systems()?,
    };
    // Not the process-wide one, which another crate may have set, or two may have disputed.
    let provider = Arc::new(crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|problem| refused(problem.to_string()))?
        .with_root_certificates(roots);
    let config = match &tls.identity {
        None => builder.with_no_client_auth(),
        Some((chain, key)) => {
            let chain = certificates(chain, "the client's certificate")?;
            let key = PrivateKeyDer::from_pem_slice(key)
                .map_err(|problem| refused(format!("the client's private key: {problem}")))?;
            builder
                .with_client_auth_cert(chain, key)
                .map_err(|problem| refused(format!("the client's certificate: {problem}")))?
        }
    };
    Ok(config.into())
}

/// Whether a certificate can be for that name.
pub(super) fn check_name(name: &str) -> Result<(), Error> {
    match ServerName::try_from(name) {
        Ok(_) => Ok(()),
        Err(_) => Err(refused(format!(
            "the server name {name:?} is no host name and no address"
        ))),
    }
}

/// Whether a server answers in plain text, once it has had that time to answer a TLS handshake.
/// It gets no secret.
pub(super) async fn answers_in_plain_text(host: &str, port: u16, patience: Duration) -> bool {
    tokio::time::sleep(patience).await;
    let Ok(mut stream) = TcpStream::connect((host, port)).await else {
        return false;
    };
    let mut reply = [0];
    // A login may be required: then the reply is an error.
    stream.write_all(b"PING\r\n").await.is_ok()
        && stream.read_exact(&mut reply).await.is_ok()
        && matches!(reply, [b'+' | b'-'])
}

fn given(pem: &[u8]) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(pem, "the CA certificates")? {
        roots
            .add(certificate)
            .map_err(|problem| refused(format!("the CA certificates: {problem}")))?;
    }
    Ok(roots)
}

fn systems() -> Result<RootCertStore, Error> {
    let found = fred::rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    // Some systems have old certificates that no rule of today accepts.
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let why = found.errors.first().map_or_else(
            || "this system has no root certificates".to_owned(),
            |error| format!("the system's root certificates cannot be read: {error}"),
        );
        return Err(refused(why));
    }
    Ok(roots)
}

fn certificates(pem: &[u8], what: &str) -> Result<Vec<CertificateDer<'static>>, Error> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match all {
        Ok(all) if all.is_empty() => {
            Err(refused(format!("{what}: no certificate in the PEM text")))
        }
        Ok(all) => Ok(all),
        Err(problem) => Err(refused(format!("{what}: {problem}"))),
    }
}

fn refused(problem: String) -> Error {
    Error::InvalidConfig {
        setting: "tls",
        problem,
        allowed: "certificates and keys as PEM text, and the name of a host",
    }
}
