//! A server in memory that runs the very Lua files of the library.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use bytes::Bytes;
use mlua::{Function, Lua, Table, Value as LuaValue, Variadic};

use crate::error::ServerError;
use crate::script::catalog;
use crate::wire::{Call, Reply};

/// The value under a key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Value {
    /// Fields in the order in which they were set.
    Hash(Vec<(Bytes, Bytes)>),
    /// A simple lock, a counter, or a value that is neither.
    Text(Bytes),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) value: Value,
    /// In milliseconds of the server's clock.
    pub(super) expires: Option<u64>,
    /// Tells it from earlier keys of that name.
    pub(super) born: u64,
}

/// The data of the server, and what it refuses.
#[derive(Debug, Default, Clone)]
pub(super) struct Database {
    pub(super) keys: BTreeMap<Bytes, Key>,
    /// The server's clock in milliseconds.
    pub(super) now: u64,
    /// The channels of messages that were published since they were taken out.
    pub(super) published: Vec<Bytes>,
    /// Commands that are refused inside scripts, with the error.
    pub(super) denied: Vec<(&'static str, String)>,
    /// How many commands were refused.
    pub(super) denials: u64,
    /// How many keys were made.
    pub(super) births: u64,
}

/// A reply of a command.
#[derive(Debug, Clone)]
pub(super) enum Answer {
    Int(i64),
    Text(Bytes),
    Status(&'static str),
    Nil,
    List(Vec<Bytes>),
}

const WRONG_TYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";

fn number(text: &[u8]) -> Option<i64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

impl Database {
    /// Removes what has expired. Whether there was anything.
    pub(super) fn expire(&mut self) -> bool {
        let now = self.now;
        let has_expired = self
            .keys
            .values()
            .any(|key| key.expires.is_some_and(|at| now > at));
        if has_expired {
            self.keys
                .retain(|_, key| key.expires.is_none_or(|at| now <= at));
        }
        has_expired
    }

    /// The owner of a lock and its hold count.
    pub(super) fn owner(&self, name: &Bytes) -> Option<(&Bytes, i64)> {
        match &self.keys.get(name)?.value {
            Value::Hash(fields) => fields
                .first()
                .map(|(field, count)| (field, number(count).unwrap_or(-1))),
            Value::Text(owner) => Some((owner, 1)),
        }
    }

    /// Which of the keys of that name there is.
    pub(super) fn born(&self, name: &Bytes) -> Option<u64> {
        self.keys.get(name).map(|key| key.born)
    }

    pub(super) fn is_hash(&self, name: &Bytes) -> bool {
        let key = self.keys.get(name);
        key.is_some_and(|key| matches!(key.value, Value::Hash(_)))
    }

    /// Makes a key, in place of one that is there.
    pub(super) fn insert(&mut self, name: &[u8], value: Value, expires: Option<u64>) {
        self.births += 1;
        let key = Key {
            value,
            expires,
            born: self.births,
        };
        self.keys.insert(Bytes::copy_from_slice(name), key);
    }

    fn text(&self, name: &[u8]) -> Result<Option<&Bytes>, String> {
        match self.keys.get(name).map(|key| &key.value) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(Value::Hash(_)) => Err(WRONG_TYPE.to_owned()),
        }
    }

    fn hash(&mut self, name: &[u8]) -> Result<Option<&mut Vec<(Bytes, Bytes)>>, String> {
        match self.keys.get_mut(name) {
            None => Ok(None),
            Some(Key {
                value: Value::Hash(fields),
                ..
            }) => Ok(Some(fields)),
            Some(_) => Err(WRONG_TYPE.to_owned()),
        }
    }

    pub(super) fn command(&mut self, command: &[u8], args: &[&[u8]]) -> Result<Answer, String> {
        if let Some((_, error)) = self
            .denied
            .iter()
            .find(|(name, _)| command.eq_ignore_ascii_case(name.as_bytes()))
        {
            let error = error.clone();
            self.denials += 1;
            return Err(error);
        }
        let name = args[0];
        let field = |fields: &[(Bytes, Bytes)]| {
            fields
                .iter()
                .position(|(field, _)| field.as_ref() == args[1])
        };
        Ok(match command {
            b"pttl" => Answer::Int(match self.keys.get(name) {
                None => -2,
                Some(Key { expires: None, .. }) => -1,
                Some(Key {
                    expires: Some(at), ..
                }) => (at - self.now) as i64,
            }),
            b"hget" => {
                let found = self.hash(name)?.and_then(|fields| {
                    let at = field(fields)?;
                    Some(fields[at].1.clone())
                });
                found.map_or(Answer::Nil, Answer::Text)
            }
            b"hexists" => {
                let found = self
                    .hash(name)?
                    .is_some_and(|fields| field(fields).is_some());
                Answer::Int(i64::from(found))
            }
            b"hgetall" => {
                let fields = self.hash(name)?.map(std::mem::take).unwrap_or_default();
                let list = fields
                    .iter()
                    .flat_map(|(field, count)| [field.clone(), count.clone()])
                    .collect();
                if let Some(old) = self.hash(name)? {
                    *old = fields;
                }
                Answer::List(list)
            }
            b"hset" => {
                let (key, value) = (
                    Bytes::copy_from_slice(args[1]),
                    Bytes::copy_from_slice(args[2]),
                );
                match self.hash(name)? {
                    Some(fields) => match field(fields) {
                        Some(at) => {
                            fields[at].1 = value;
                            Answer::Int(0)
                        }
                        None => {
                            fields.push((key, value));
                            Answer::Int(1)
                        }
                    },
                    None => {
                        self.insert(name, Value::Hash(vec![(key, value)]), None);
                        Answer::Int(1)
                    }
                }
            }
            b"hincrby" => {
                let before = self.hash(name)?.and_then(|fields| {
                    let at = field(fields)?;
                    number(&fields[at].1)
                });
                let after = before.unwrap_or(0) + number(args[2]).unwrap_or(0);
                let text = after.to_string();
                self.command(b"hset", &[name, args[1], text.as_bytes()])?;
                Answer::Int(after)
            }
            b"hdel" => {
                let mut removed = 0;
                let mut is_empty = false;
                if let Some(fields) = self.hash(name)? {
                    if let Some(at) = field(fields) {
                        fields.remove(at);
                        removed = 1;
                    }
                    is_empty = fields.is_empty();
                }
                if is_empty {
                    self.keys.remove(name);
                }
                Answer::Int(removed)
            }
            b"get" => self
                .text(name)?
                .map_or(Answer::Nil, |text| Answer::Text(text.clone())),
            b"set" => {
                let value = Bytes::copy_from_slice(args[1]);
                let (mut must_be_new, mut millis) = (false, None);
                let mut options = args[2..].iter();
                while let Some(option) = options.next() {
                    match option.to_ascii_lowercase().as_slice() {
                        b"nx" => must_be_new = true,
                        b"px" => {
                            let next = options.next().and_then(|text| number(text));
                            millis = Some(next.ok_or("ERR value is not an integer")?);
                        }
                        _ => return Err("ERR syntax error".to_owned()),
                    }
                }
                if millis.is_some_and(|millis| millis <= 0) {
                    return Err("ERR invalid expire time in 'set' command".to_owned());
                }
                if must_be_new && self.keys.contains_key(name) {
                    Answer::Nil
                } else {
                    let expires = millis.map(|millis| self.now + millis as u64);
                    self.insert(name, Value::Text(value), expires);
                    Answer::Status("OK")
                }
            }
            b"incr" => {
                let before = match self.text(name)? {
                    None => None,
                    Some(text) => {
                        Some(number(text).ok_or("ERR value is not an integer or out of range")?)
                    }
                };
                let after = before
                    .unwrap_or(0)
                    .checked_add(1)
                    .ok_or("ERR increment or decrement would overflow")?;
                let text = Value::Text(after.to_string().into());
                match self.keys.get_mut(name) {
                    Some(key) => key.value = text,
                    None => self.insert(name, text, None),
                }
                Answer::Int(after)
            }
            b"del" => Answer::Int(i64::from(self.keys.remove(name).is_some())),
            b"pexpire" => {
                let millis = number(args[1]).ok_or("ERR value is not an integer")?;
                let now = self.now;
                match self.keys.get_mut(name) {
                    None => Answer::Int(0),
                    Some(_) if millis <= 0 => {
                        self.keys.remove(name);
                        Answer::Int(1)
                    }
                    Some(key) => {
                        key.expires = Some(now + millis as u64);
                        Answer::Int(1)
                    }
                }
            }
            b"publish" => {
                self.published.push(Bytes::copy_from_slice(name));
                Answer::Int(0)
            }
            other => panic!("a script uses {:?}", String::from_utf8_lossy(other)),
        })
    }
}

/// The compiled scripts, with the database that they run on.
pub(super) struct Scripts {
    lua: Lua,
    functions: Vec<(&'static str, Function)>,
    database: Rc<RefCell<Database>>,
}

thread_local! {
    static SCRIPTS: Rc<Scripts> = Rc::new(Scripts::compile());
}

/// The text of a script: that of the program, or, with `SIM_LUA`, of the file in that directory.
fn text_of(text: &'static str) -> Cow<'static, str> {
    let Some(directory) = std::env::var_os("SIM_LUA") else {
        return text.into();
    };
    // The first line begins with the name.
    let name = text[3..].split(':').next().unwrap_or_default();
    let file = std::path::Path::new(&directory).join(name);
    std::fs::read_to_string(file).unwrap().into()
}

impl Scripts {
    /// The scripts of this thread, compiled once.
    pub(super) fn of_thread() -> Rc<Self> {
        SCRIPTS.with(Rc::clone)
    }

    fn compile() -> Self {
        let lua = Lua::new();
        let database = Rc::new(RefCell::new(Database::default()));
        let redis = lua.create_table().unwrap();
        for (name, raises) in [("call", true), ("pcall", false)] {
            let database = Rc::clone(&database);
            let function = lua
                .create_function(move |lua, args: Variadic<LuaValue>| {
                    let texts: Vec<mlua::String> = args
                        .iter()
                        .filter_map(|arg| lua.coerce_string(arg.clone()).ok().flatten())
                        .collect();
                    let texts: Vec<_> = texts.iter().map(mlua::String::as_bytes).collect();
                    let texts: Vec<&[u8]> = texts.iter().map(AsRef::as_ref).collect();
                    assert_eq!(texts.len(), args.len(), "each argument is a text");
                    let answer = database.borrow_mut().command(texts[0], &texts[1..]);
                    Ok(match answer {
                        Ok(Answer::Int(number)) => LuaValue::Number(number as f64),
                        Ok(Answer::Text(text)) => LuaValue::String(lua.create_string(&text)?),
                        Ok(Answer::Nil) => LuaValue::Boolean(false),
                        Ok(Answer::Status(text)) => {
                            let table = lua.create_table()?;
                            table.raw_set("ok", text)?;
                            LuaValue::Table(table)
                        }
                        Ok(Answer::List(list)) => {
                            let list = list
                                .iter()
                                .map(|text| lua.create_string(text))
                                .collect::<Result<Vec<_>, _>>()?;
                            LuaValue::Table(lua.create_sequence_from(list)?)
                        }
                        Err(error) if raises => return Err(mlua::Error::runtime(error)),
                        Err(error) => {
                            let table = lua.create_table()?;
                            table.raw_set("err", error)?;
                            LuaValue::Table(table)
                        }
                    })
                })
                .unwrap();
            redis.set(name, function).unwrap();
        }
        lua.globals().set("redis", redis).unwrap();
        let functions = catalog::ALL
            .iter()
            .map(|script| {
                let source = script.source();
                // The tables are arguments of the chunk rather than globals; the text is the same.
                let text = text_of(source.text);
                let chunk = format!("local KEYS, ARGV = ...\n{text}");
                let function = lua.load(chunk).into_function().unwrap();
                (source.sha1, function)
            })
            .collect();
        Self {
            lua,
            functions,
            database,
        }
    }

    /// Runs the script of a call on that database.
    pub(super) fn run(&self, database: &mut Database, call: &Call) -> Result<Reply, ServerError> {
        std::mem::swap(database, &mut self.database.borrow_mut());
        let reply = self.run_swapped(call);
        std::mem::swap(database, &mut self.database.borrow_mut());
        reply
    }

    fn run_swapped(&self, call: &Call) -> Result<Reply, ServerError> {
        self.database.borrow_mut().expire();
        let (_, function) = self
            .functions
            .iter()
            .find(|(sha1, _)| *sha1 == call.script.sha1)
            .expect("the script is in the catalog");
        let text = |text: &Bytes| self.lua.create_string(text).unwrap();
        let keys = self
            .lua
            .create_sequence_from(call.keys.iter().map(text))
            .unwrap();
        let ticket = Bytes::from_static(b"7");
        let args = std::iter::once(&ticket).chain(call.args.iter()).map(text);
        let args = self.lua.create_sequence_from(args).unwrap();
        match function.call::<Table>((keys, args)) {
            Ok(table) => {
                let mut values = Vec::with_capacity(4);
                for at in 1.. {
                    match table.raw_get::<LuaValue>(at).unwrap() {
                        LuaValue::Nil => break,
                        LuaValue::Integer(number) => values.push(Reply::Int(number)),
                        LuaValue::Number(number) => values.push(Reply::Int(number as i64)),
                        LuaValue::String(text) => {
                            values.push(Reply::Text(Bytes::copy_from_slice(&text.as_bytes())));
                        }
                        other => panic!("a script replies {other:?}"),
                    }
                }
                assert_eq!(values.remove(0), Reply::Text(ticket));
                Ok(Reply::List(values))
            }
            Err(mlua::Error::CallbackError { cause, .. }) => {
                Err(cause.to_string().replacen("runtime error: ", "", 1).into())
            }
            Err(error) => panic!("a script failed: {error}"),
        }
    }
}
