//! What the library logs on this thread and on those of clients that it connects: events, and spans
//! when they close.

#![allow(dead_code)]

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, OnceLock};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::DefaultGuard;
use tracing::{Dispatch, Event, Level, Subscriber};
use tracing_subscriber::Registry;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

/// The events and spans of the thread that made it, for as long as it lives, and of each client
/// that this thread connects meanwhile. Tests that use it run on one thread.
pub struct Log {
    lines: Arc<Mutex<Vec<Line>>>,
    _default: DefaultGuard,
}

/// An event, or a span that was closed.
#[derive(Debug, Clone)]
pub struct Line {
    pub level: Level,
    /// The event's message, or the span's name.
    pub text: String,
    pub fields: BTreeMap<&'static str, String>,
}

impl Log {
    pub fn capture() -> Self {
        // With one subscriber alone, tracing takes an event that a thread without a subscriber
        // records first for one that nobody wants, and then no thread gets it. This is a second
        // one.
        static OTHER: OnceLock<Dispatch> = OnceLock::new();
        OTHER.get_or_init(|| Dispatch::new(Registry::default()));
        let lines = Arc::<Mutex<Vec<Line>>>::default();
        let capture = Capture(Arc::clone(&lines));
        let default = tracing::subscriber::set_default(Registry::default().with(capture));
        Self {
            lines,
            _default: default,
        }
    }

    /// The lines whose text contains this.
    pub fn with(&self, text: &str) -> Vec<Line> {
        let lines = self.lines.lock().unwrap();
        lines
            .iter()
            .filter(|line| line.text.contains(text))
            .cloned()
            .collect()
    }

    /// The lines of that level or above it.
    pub fn from(&self, level: Level) -> Vec<Line> {
        let lines = self.lines.lock().unwrap();
        lines
            .iter()
            .filter(|line| line.level <= level)
            .cloned()
            .collect()
    }
}

struct Capture(Arc<Mutex<Vec<Line>>>);

#[derive(Default)]
struct Fields(BTreeMap<&'static str, String>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Capture {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if !is_ours(event.metadata().target()) {
            return;
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        let text = fields.0.remove("message").unwrap_or_default();
        self.0.lock().unwrap().push(Line {
            level: *event.metadata().level(),
            text,
            fields: fields.0,
        });
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(fields);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id) {
            if let Some(fields) = span.extensions_mut().get_mut::<Fields>() {
                values.record(fields);
            }
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else {
            return;
        };
        if !is_ours(span.metadata().target()) {
            return;
        }
        let fields = span.extensions_mut().remove::<Fields>().unwrap_or_default();
        self.0.lock().unwrap().push(Line {
            level: *span.metadata().level(),
            text: span.name().to_owned(),
            fields: fields.0,
        });
    }
}

fn is_ours(target: &str) -> bool {
    target.starts_with("redisson_lock")
}
