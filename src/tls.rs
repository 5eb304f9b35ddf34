//! TLS settings.

use std::fmt;
use std::sync::Arc;

/// How TLS connections are made to `rediss://` and `valkeys://` URLs (feature `tls`).
///
/// By default the system's root certificates are trusted, the certificate has to be for the host of
/// the URL, and the client has no certificate of its own. There is no way to trust a certificate
/// that was not checked.
///
/// The application reads the files, because only it knows when they change: a client uses what it
/// was built with until it ends.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use redisson_lock::{LockClient, Tls};
///
/// let tls = Tls::new()
///     .ca_certificates(std::fs::read("ca.pem")?)
///     .client_certificate(std::fs::read("client.pem")?, std::fs::read("client.key")?);
/// let client = LockClient::builder()
///     .tls(tls)
///     .connect("rediss://redis.internal:6380")
///     .await?;
/// # drop(client);
/// # Ok(()) }
/// ```
#[derive(Clone, Default)]
pub struct Tls {
    pub(crate) roots: Option<Pem>,
    /// The chain of certificates, and the private key.
    pub(crate) identity: Option<(Pem, Pem)>,
    pub(crate) server_name: Option<String>,
}

type Pem = Arc<[u8]>;

impl Tls {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Trusts these certificates (PEM, one or more) and no others. Default: the system's, or those
    /// that the environment variables `SSL_CERT_FILE` and `SSL_CERT_DIR` name.
    #[must_use]
    pub fn ca_certificates(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.roots = Some(pem.into().into());
        self
    }

    /// The client's own certificate and those between it and its authority, and its private key
    /// (both PEM; the key as PKCS #8, PKCS #1 or SEC 1, not encrypted). A server with
    /// `tls-auth-clients yes`, its default, asks for it
    /// (<https://redis.io/docs/latest/operate/oss_and_stack/management/security/encryption/>).
    #[must_use]
    pub fn client_certificate(
        mut self,
        chain: impl Into<Vec<u8>>,
        key: impl Into<Vec<u8>>,
    ) -> Self {
        self.identity = Some((chain.into().into(), key.into().into()));
        self
    }

    /// The name for which the server's certificate has to be. Default: the host of the URL. For a
    /// server that is reached by another name or address than its certificate says.
    #[must_use]
    pub fn server_name(mut self, name: impl Into<String>) -> Self {
        self.server_name = Some(name.into());
        self
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls")
            .field("has_ca_certificates", &self.roots.is_some())
            .field("has_client_certificate", &self.identity.is_some())
            .field("server_name", &self.server_name)
            .finish()
    }
}
