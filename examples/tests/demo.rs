//! The flash-sale example, run as a user runs it: its output, its exit status, and that it leaves
//! no processes, keys or files.

mod recipes;
#[path = "../../tests/support/server.rs"]
mod server;

use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use server::{Server, wait_until};
use tempfile::TempDir;

/// The limit for a small sale, including the pause of 2 s after the kill.
const LIMIT: Duration = Duration::from_secs(90);

const STOCK: u64 = 100;
const SMALL: [&str; 6] = ["--stock", "100", "--workers", "3", "--buyers", "4"];

/// Printed half-way through the second sale; the lock then stays held for about 2 s.
const KILLED: &str = "was killed while it held the lock";

#[test]
fn locked_sale_on_private_server_sells_exactly_the_stock() {
    let home = TempDir::new().expect("a temporary folder");
    let mut demo = Demo::start(private(&home).args(SMALL));
    let (_, server) = demo.private_server();
    let status = demo.ended();
    let output = demo.output();
    assert!(status.success(), "{status}\n{output}");

    let [unlocked, locked, reentrant] = row(&output, "sold");
    assert!(unlocked > STOCK, "{output}");
    assert_eq!([locked, reentrant], [STOCK; 2], "{output}");
    assert_eq!(
        row(&output, "oversold"),
        [unlocked - STOCK, 0, 0],
        "{output}"
    );
    assert_eq!(row(&output, "left")[1..], [0, 0], "{output}");
    assert_eq!(
        row(&output, "most orders for one item")[1..],
        [1, 1],
        "{output}"
    );
    assert_eq!(row(&output, "workers killed"), [0, 1, 0], "{output}");
    assert!(
        line(&output, "hold count, nested").ends_with(" 2"),
        "{output}"
    );
    let printed = between(
        &output,
        "Without a lock ",
        " items that do not exist were sold. With it: 0,",
    );
    assert_eq!(printed, (unlocked - STOCK) as f64, "{output}");

    let half = between(&output, &format!("{KILLED}, with "), " left");
    assert!((0.0..=STOCK as f64 / 2.0).contains(&half), "{output}");
    let pause = between(&output, "The others continued after ", " s.");
    assert!((0.2..20.0).contains(&pause), "{output}");

    assert_gone(server);
    assert_empty(&home);
}

/// The killed worker's lease is all that the others wait for: they end as soon as it does.
#[test]
fn pause_is_printed_if_sale_ends_with_it() {
    let home = TempDir::new().expect("a temporary folder");
    let mut demo = Demo::start(private(&home).args(["--stock", "1"]));
    let status = demo.ended();
    let output = demo.output();
    assert!(status.success(), "{status}\n{output}");
    assert!(output.contains(&format!("{KILLED}, with 0 left")));
    let pause = between(&output, "The others continued after ", " s.");
    assert!((0.2..20.0).contains(&pause), "{output}");
}

#[test]
fn named_server_keeps_only_its_own_keys() {
    let server = Server::builder().password("hunter2").start();
    let mut redis = server.connection();
    let theirs = [
        ("stock_01", "theirs"),
        ("lock:stock_01", "theirs"),
        ("orders", "theirs"),
    ];
    redis::cmd("MSET")
        .arg(&theirs)
        .exec(&mut redis)
        .expect("MSET");

    let mut demo = Demo::start(named(&server).args(SMALL));
    let status = demo.ended();
    let output = demo.output();
    assert!(status.success(), "{status}\n{output}");
    assert_eq!(row(&output, "sold")[1..], [STOCK; 2], "{output}");
    assert!(!output.contains("hunter2"), "{output}");

    assert_eq!(keys(&mut redis).len(), theirs.len());
    for (key, value) in theirs {
        let found: String = redis::cmd("GET").arg(key).query(&mut redis).expect("GET");
        assert_eq!(found, value, "{key}");
    }
    wait_until("all clients have disconnected", LIMIT, || {
        clients(&mut redis) == 1
    });
}

#[test]
fn failed_locked_sale_is_reported() {
    let server = Server::start();
    let mut redis = server.connection();
    let mut demo = Demo::start(named(&server).args(SMALL));
    demo.until(KILLED);
    let orders = keys(&mut redis)
        .into_iter()
        .find(|key| key.ends_with(":orders"))
        .expect("the orders");
    redis::cmd("RPUSH")
        .arg(orders)
        .arg("1 another-buyer")
        .exec(&mut redis)
        .expect("RPUSH");

    let status = demo.ended();
    let output = demo.output();
    assert_eq!(status.code(), Some(1), "{output}");
    assert_eq!(row(&output, "sold")[1..], [STOCK + 1, STOCK], "{output}");
    assert_eq!(row(&output, "oversold")[1..], [1, 0], "{output}");
    assert!(
        output
            .contains("FAILED: lock: 101 sold and 0 left of 100; lock: one item was sold 2 times."),
        "{output}"
    );
    assert_eq!(keys(&mut redis), [""; 0]);
}

#[test]
fn interrupted_demo_cleans_up() {
    let server = Server::start();
    let mut redis = server.connection();
    let home = TempDir::new().expect("a temporary folder");
    let mut on_named = Demo::start(named(&server).args(SMALL));
    let mut on_private = Demo::start(private(&home).args(SMALL));
    let (_, private) = on_private.private_server();
    for (demo, signal, code) in [
        (&mut on_named, Signal::SIGINT, 130),
        (&mut on_private, Signal::SIGTERM, 143),
    ] {
        demo.until(KILLED);
        demo.signal(signal);
        let status = demo.ended();
        let output = demo.output();
        assert_eq!(status.code(), Some(code), "{output}");
        assert!(output.contains("Interrupted"), "{output}");
    }
    assert_eq!(keys(&mut redis), [""; 0]);
    wait_until("all clients have disconnected", LIMIT, || {
        clients(&mut redis) == 1
    });
    assert_gone(private);
    assert_empty(&home);
}

#[test]
fn killed_demo_leaves_no_processes() {
    let server = Server::start();
    let mut redis = server.connection();
    let home = TempDir::new().expect("a temporary folder");
    let mut on_named = Demo::start(named(&server).args(SMALL));
    let mut on_private = Demo::start(private(&home).args(SMALL));
    let (address, _) = on_private.private_server();
    for demo in [&mut on_named, &mut on_private] {
        demo.until(KILLED);
        demo.signal(Signal::SIGKILL);
        demo.ended();
    }
    wait_until("the workers have ended", LIMIT, || clients(&mut redis) == 1);
    // By its port: where no process reaps orphans, the process id stays.
    wait_until("the private server has ended", LIMIT, || {
        TcpStream::connect(&address).is_err()
    });
    wait_until("its folder is removed", LIMIT, || is_empty(&home));
}

#[test]
fn invalid_option_is_refused() {
    for (args, expected) in [
        (&["--stok", "5"][..], r#"unknown option "--stok""#),
        (&["--stock"], "--stock needs a number"),
        (
            &["--stock", "0"],
            r#"--stock "0" is refused: a number from 1 to 1000000"#,
        ),
        (&["--buyers=many"], r#"--buyers "many" is refused"#),
        (
            &["--workers", "1"],
            r#"--workers "1" is refused: a number from 2"#,
        ),
        (&["--think", "-1"], r#"--think "-1" is refused"#),
        (&["5"], r#"unknown option "5""#),
    ] {
        let output = example().args(args).output().expect("the example's output");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {errors}");
        assert!(errors.contains(expected), "{args:?}: {errors}");
        assert!(output.stdout.is_empty(), "{args:?}");
    }
    let help = example()
        .arg("--help")
        .output()
        .expect("the example's output");
    let text = String::from_utf8_lossy(&help.stdout);
    assert!(help.status.success());
    for option in [
        "--stock",
        "--workers",
        "--buyers",
        "--think",
        "REDIS_URL",
        "REDIS_SERVER",
    ] {
        assert!(text.contains(option), "{option} is missing:\n{text}");
    }
}

#[test]
fn missing_server_is_reported_with_instructions() {
    let nowhere = TempDir::new().expect("a temporary folder");
    let none = example()
        .env("PATH", nowhere.path())
        .output()
        .expect("the example's output");
    let errors = String::from_utf8_lossy(&none.stderr);
    assert_eq!(none.status.code(), Some(1), "{errors}");
    assert!(
        errors.contains("make demo") && errors.contains("REDIS_URL="),
        "{errors}"
    );

    // No server listens on port 1.
    let unreachable = example()
        .env("REDIS_URL", "redis://:hunter2@127.0.0.1:1")
        .output()
        .expect("the example's output");
    let errors = String::from_utf8_lossy(&unreachable.stderr);
    assert_eq!(unreachable.status.code(), Some(1), "{errors}");
    assert!(
        errors.contains("REDIS_URL: no connection to 127.0.0.1:1") && !errors.contains("hunter2"),
        "{errors}"
    );
}

/// A running demo, and its output so far. Dropping it kills the process.
struct Demo {
    process: Child,
    lines: Receiver<String>,
    printed: Vec<String>,
    errors: Option<JoinHandle<String>>,
}

impl Demo {
    fn start(command: &mut Command) -> Self {
        let mut process = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the example starts");
        let stdout = BufReader::new(process.stdout.take().expect("its output"));
        let mut stderr = process.stderr.take().expect("its errors");
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // An error means that the test has dropped the demo.
                let _ = sender.send(line);
            }
        });
        let errors = std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = stderr.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        });
        Self {
            process,
            lines,
            printed: Vec::new(),
            errors: Some(errors),
        }
    }

    /// Reads lines until one contains these words, and returns it.
    #[track_caller]
    fn until(&mut self, words: &str) -> String {
        let deadline = Instant::now() + LIMIT;
        loop {
            match self
                .lines
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                Ok(line) => {
                    self.printed.push(line.clone());
                    if line.contains(words) {
                        return line;
                    }
                }
                Err(error) => panic!(
                    "the demo did not print {words:?} ({error}):\n{}",
                    self.printed.join("\n")
                ),
            }
        }
    }

    /// The address and the process id of its private server.
    #[track_caller]
    fn private_server(&mut self) -> (String, Pid) {
        let line = self.until("Server: private, ");
        let mut words = line.split(", ").skip(1);
        let (address, pid) = (
            words.next(),
            words
                .last()
                .and_then(|word| word.strip_prefix("pid ")?.parse().ok()),
        );
        let (Some(address), Some(pid)) = (address, pid) else {
            panic!("no address or no process id: {line}")
        };
        (address.to_owned(), Pid::from_raw(pid))
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.process.id().try_into().expect("a process id"));
        kill(pid, signal).expect("a signal");
    }

    /// Waits for the end of the output and of the process.
    #[track_caller]
    fn ended(&mut self) -> ExitStatus {
        let deadline = Instant::now() + LIMIT;
        loop {
            match self
                .lines
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                Ok(line) => self.printed.push(line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    panic!("the demo does not end:\n{}", self.printed.join("\n"))
                }
            }
        }
        self.process.wait().expect("the process's end")
    }

    /// The whole output of an ended demo, errors last.
    fn output(&mut self) -> String {
        let errors = self
            .errors
            .take()
            .map(|errors| errors.join().expect("its errors"))
            .unwrap_or_default();
        format!("{}\n{errors}", self.printed.join("\n"))
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        // An error means that the process has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The example without a server.
fn example() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flash_sale"));
    command
        .env_remove("REDIS_URL")
        .env_remove("REDIS_SERVER")
        .stdin(Stdio::null());
    command
}

/// The example with a private server, which keeps its data in this folder.
fn private(home: &TempDir) -> Command {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../.ci/redis-server");
    let found = Command::new("bash")
        .arg(script)
        .stdin(Stdio::null())
        .output()
        .expect("bash");
    assert!(
        found.status.success(),
        "{}",
        String::from_utf8_lossy(&found.stderr)
    );
    let server = String::from_utf8(found.stdout).expect("a path in UTF-8");
    let mut command = example();
    command
        .env("REDIS_SERVER", server.trim_end())
        .env("TMPDIR", home.path());
    command
}

/// The example on this server.
fn named(server: &Server) -> Command {
    let mut command = example();
    command.env("REDIS_URL", server.url());
    command
}

/// The row of the table with this name.
#[track_caller]
fn line<'a>(output: &'a str, name: &str) -> &'a str {
    let found = output
        .lines()
        .rfind(|line| line.trim_start().starts_with(&format!("{name}  ")));
    found.unwrap_or_else(|| panic!("no row {name:?}:\n{output}"))
}

/// The figures of the three sales in the row with this name.
#[track_caller]
fn row(output: &str, name: &str) -> [u64; 3] {
    let line = line(output, name);
    let figures = line
        .trim_start()
        .trim_start_matches(name)
        .split_whitespace();
    let figures: Vec<u64> = figures
        .map(|figure| figure.replace(',', "").parse().expect("a figure"))
        .collect();
    figures
        .try_into()
        .unwrap_or_else(|_| panic!("not three figures: {line}"))
}

/// The number between these words.
#[track_caller]
fn between(output: &str, before: &str, after: &str) -> f64 {
    let number = output
        .split_once(before)
        .and_then(|(_, rest)| rest.split_once(after))
        .map(|(number, _)| number);
    number
        .and_then(|number| number.replace(',', "").parse().ok())
        .unwrap_or_else(|| panic!("no number between {before:?} and {after:?}:\n{output}"))
}

fn keys(redis: &mut redis::Connection) -> Vec<String> {
    redis::cmd("KEYS").arg("*").query(redis).expect("KEYS")
}

/// The number of connections to the server, including this one.
fn clients(redis: &mut redis::Connection) -> usize {
    let list: String = redis::cmd("CLIENT")
        .arg("LIST")
        .query(redis)
        .expect("CLIENT LIST");
    list.lines().count()
}

#[track_caller]
fn assert_gone(process: Pid) {
    assert_eq!(
        kill(process, None),
        Err(Errno::ESRCH),
        "process {process} has not ended"
    );
}

fn is_empty(folder: &TempDir) -> bool {
    folder.path().read_dir().expect("a folder").next().is_none()
}

#[track_caller]
fn assert_empty(folder: &TempDir) {
    assert!(
        is_empty(folder),
        "{:?}",
        folder
            .path()
            .read_dir()
            .expect("a folder")
            .collect::<Vec<_>>()
    );
}
