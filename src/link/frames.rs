//! Converts the client library's frames to replies.

use bytes::Bytes;
use fred::types::Resp3Frame;

use crate::wire::{Failure, Reply};

/// Converts a frame to a reply; an error frame to a server error.
pub(super) fn read(frame: Resp3Frame) -> Result<Reply, Failure> {
    let text = |data: &[u8]| String::from_utf8_lossy(data).into_owned();
    match frame {
        Resp3Frame::SimpleError { data, .. } => Err(Failure::Server(data.to_string().into())),
        Resp3Frame::BlobError { data, .. } => Err(Failure::Server(text(&data).into())),
        frame => Ok(value(frame)),
    }
}

fn value(frame: Resp3Frame) -> Reply {
    match frame {
        Resp3Frame::Number { data, .. } => Reply::Int(data),
        Resp3Frame::Boolean { data, .. } => Reply::Int(i64::from(data)),
        Resp3Frame::BlobString { data, .. }
        | Resp3Frame::SimpleString { data, .. }
        | Resp3Frame::BigNumber { data, .. }
        | Resp3Frame::VerbatimString { data, .. } => Reply::Text(data),
        Resp3Frame::Array { data, .. } | Resp3Frame::Push { data, .. } => {
            Reply::List(data.into_iter().map(value).collect())
        }
        Resp3Frame::Set { data, .. } => Reply::List(data.into_iter().map(value).collect()),
        Resp3Frame::Map { data, .. } => Reply::List(
            data.into_iter()
                .flat_map(|(key, item)| [value(key), value(item)])
                .collect(),
        ),
        // An error inside an array is kept as text.
        Resp3Frame::SimpleError { data, .. } => Reply::Text(Bytes::from(data.to_string())),
        Resp3Frame::BlobError { data, .. } => Reply::Text(data),
        Resp3Frame::Double { data, .. } => Reply::Text(Bytes::from(data.to_string())),
        _ => Reply::Nil,
    }
}
