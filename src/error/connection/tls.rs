//! What is wrong with a TLS connection.

/// Why there can be no TLS connection (feature `tls`):
/// [`ConnectionError::tls_problem`](crate::ConnectionError::tls_problem).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TlsProblem {
    /// The server answers in plain text. Use `redis://`, or the server's port for TLS.
    PlainText,
    /// The server's certificate is from an authority that is not trusted. Pass that one's
    /// certificate to [`Tls::ca_certificates`](crate::Tls::ca_certificates).
    UnknownAuthority,
    /// The server's certificate is for other names than the one that was asked for. Use one of
    /// those in the URL, or pass it to [`Tls::server_name`](crate::Tls::server_name).
    WrongName,
    /// The server's certificate has expired. Renew it.
    Expired,
    /// The server's certificate is not valid yet. Check the clocks.
    NotYetValid,
    /// The server's certificate is wrong for another reason, which the message states.
    InvalidCertificate,
    /// The server ended the handshake: most often it requires a certificate of the client, or does
    /// not trust the one it got. See
    /// [`Tls::client_certificate`](crate::Tls::client_certificate).
    Refused,
    /// Anything else, such as no protocol version in common. The message states it.
    Other,
}

impl TlsProblem {
    /// The problem of an error that the client library wrote as text: the one of rustls.
    pub(super) fn from_debug(text: &str) -> Option<Self> {
        if text == super::ConnectionError::PLAIN_TEXT {
            return Some(Self::PlainText);
        }
        // `Custom { kind: InvalidData, error: InvalidCertificate(Expired) }`
        let (_, error) = text.split_once("kind: InvalidData, error: ")?;
        if let Some(certificate) = error.strip_prefix("InvalidCertificate(") {
            let is = |name| certificate.starts_with(name);
            return Some(match () {
                () if is("NotValidForName") => Self::WrongName,
                // By a name that is trusted, with another key.
                () if is("UnknownIssuer") || is("BadSignature") => Self::UnknownAuthority,
                () if is("Expired") => Self::Expired,
                () if is("NotValidYet") => Self::NotYetValid,
                () => Self::InvalidCertificate,
            });
        }
        let is = |name| error.starts_with(name);
        match () {
            () if is("AlertReceived(") => Some(Self::Refused),
            () if is("InvalidMessage(") => Some(Self::PlainText),
            () if is("PeerIncompatible(") || is("PeerMisbehaved(") => Some(Self::Other),
            () => None,
        }
    }

    /// A message for users, with the client library's text where that says more.
    pub(super) fn explain(self, text: &str) -> String {
        let detail = text
            .split_once("error: ")
            .map_or(text, |(_, error)| error.trim_end_matches([' ', '}']));
        match self {
            Self::PlainText => {
                "the server does not speak TLS: use redis://, or its port for TLS".to_owned()
            }
            Self::UnknownAuthority => {
                "the server's certificate is from an authority that is not trusted: pass that one's \
                 certificate to Tls::ca_certificates"
                    .to_owned()
            }
            Self::WrongName => format!(
                "the server's certificate is for other names: use one of those, or pass it to \
                 Tls::server_name ({detail})"
            ),
            Self::Expired => format!("the server's certificate has expired ({detail})"),
            Self::NotYetValid => format!("the server's certificate is not valid yet ({detail})"),
            Self::InvalidCertificate => format!("the server's certificate is invalid ({detail})"),
            Self::Refused => format!(
                "the server refused the TLS handshake: it may require a certificate of the client, \
                 see Tls::client_certificate ({detail})"
            ),
            Self::Other => format!("no TLS connection ({detail})"),
        }
    }
}
