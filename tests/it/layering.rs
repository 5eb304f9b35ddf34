//! The layers of the source, read from its text.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The files of a folder below `src/`, with the part that is no test.
fn sources(folder: &str) -> Vec<(PathBuf, String)> {
    let mut files = Vec::new();
    let mut folders = vec![
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("src")
            .join(folder),
    ];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("sim") {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
                let code = code.lines().filter(|line| !line.trim().starts_with("//"));
                files.push((path.clone(), code.collect::<Vec<_>>().join("\n")));
            }
        }
    }
    files
}

#[test]
fn engine_names_no_io_clock_or_randomness() {
    let files = sources("engine");
    assert!(files.len() > 10, "{}", files.len());
    for (path, code) in files {
        for name in [
            "tokio",
            "fred",
            "Instant",
            "SystemTime",
            "rand::random",
            "rand::rng(",
            "parking_lot",
            "tracing",
            "std::thread",
            "std::net",
            "crate::link",
            "crate::driver",
            "crate::lock",
        ] {
            assert!(!code.contains(name), "{} names {name}", path.display());
        }
    }
}

#[test]
fn only_the_link_names_the_client_library() {
    for (path, code) in sources("") {
        let is_link = path.components().any(|part| part.as_os_str() == "link");
        assert!(is_link || !code.contains("fred::"), "{}", path.display());
    }
}

/// The module of the first level to which a file belongs.
fn module_of(path: &Path) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let first = path
        .strip_prefix(root)
        .unwrap()
        .components()
        .next()
        .unwrap();
    let name = first.as_os_str().to_str().unwrap();
    name.trim_end_matches(".rs").to_owned()
}

#[test]
fn imports_form_no_cycle() {
    let mut arrows: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let files = sources("");
    let modules: BTreeSet<_> = files.iter().map(|(path, _)| module_of(path)).collect();
    for (path, code) in files {
        let from = module_of(&path);
        for after in code.split("crate::").skip(1) {
            let name: String = after
                .chars()
                .take_while(|c| c.is_alphanumeric() || *c == '_')
                .collect();
            if name != from && modules.contains(&name) {
                arrows.entry(from.clone()).or_default().insert(name);
            }
        }
    }
    assert!(arrows["engine"].contains("kind"), "{arrows:?}");
    // Modules without arrows to others are taken away, again and again, until none is left.
    let mut left: BTreeSet<_> = modules.clone();
    loop {
        let before = left.len();
        let ends: Vec<_> = left
            .iter()
            .filter(|module| {
                let targets = arrows.get(*module);
                targets.is_none_or(|targets| targets.is_disjoint(&left))
            })
            .cloned()
            .collect();
        for module in ends {
            left.remove(&module);
        }
        if left.len() == before {
            break;
        }
    }
    assert!(left.is_empty(), "these import each other: {left:?}");
}
