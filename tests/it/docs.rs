//! The documents name tests, files, log events and settings: they exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All files below a folder with this ending.
fn files(folder: &str, ending: &str) -> Vec<PathBuf> {
    let mut folders = vec![root().join(folder)];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|found| found == ending) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// The documents of the root and the pages of docs/, relative to the root.
fn documents() -> Vec<PathBuf> {
    let pages = files("docs", "md");
    let pages = pages
        .iter()
        .map(|page| page.strip_prefix(root()).unwrap().to_owned());
    let mut documents: Vec<_> = pages.collect();
    let others = fs::read_dir(root()).unwrap().map(|entry| entry.unwrap());
    let others = others.map(|entry| PathBuf::from(entry.file_name()));
    documents.extend(others.filter(|name| name.extension().is_some_and(|found| found == "md")));
    documents
}

/// The lines of a document that are no code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut in_code = false;
    text.lines().filter(move |line| {
        let fence = line.starts_with("```");
        in_code ^= fence;
        !in_code && !fence
    })
}

/// The anchors of a document's headings, as repository pages and rustdoc make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter(|line| line.starts_with('#'));
    headings
        .map(|heading| {
            let title = heading.trim_start_matches('#').trim().to_lowercase();
            let kept = title
                .chars()
                .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        })
        .collect()
}

/// The targets of the links in a document: `[text](target)` and `[reference]: target`.
fn targets(text: &str) -> Vec<String> {
    let mut targets = Vec::new();
    for line in prose(text) {
        if let Some((_, target)) = definition(line) {
            targets.push(target.to_owned());
        }
        let links = line.split("](").skip(1);
        targets.extend(links.filter_map(|rest| Some(rest.split_once(')')?.0.to_owned())));
    }
    targets
}

/// A line `[reference]: target`.
fn definition(line: &str) -> Option<(&str, &str)> {
    line.strip_prefix('[')?.split_once("]: ")
}

fn is_elsewhere(target: &str) -> bool {
    target.starts_with("https://") || target.starts_with("http://")
}

#[test]
fn links_between_documents_lead_to_files_and_headings() {
    let mut dead = Vec::new();
    let mut links = 0;
    for document in documents() {
        let text = read(&document);
        let folder = document.parent().unwrap();
        for target in targets(&text).iter().filter(|target| !is_elsewhere(target)) {
            links += 1;
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let file = match file {
                "" => document.clone(),
                file => folder.join(file),
            };
            let found = root().join(&file).is_file()
                && (anchor.is_empty() || anchors(&read(&file)).contains(anchor));
            if !found {
                dead.push(format!("{}: {target}", document.display()));
            }
        }
    }
    assert!(links > 20, "only {links} links were found");
    assert!(dead.is_empty(), "{dead:#?}");
}

/// The README links to the published documentation: to the list of pages, or to a page.
#[test]
fn links_to_published_documentation_lead_to_pages_of_rustdoc() {
    const PUBLISHED: &str = "https://docs.rs/redisson-lock/";
    const PAGES: &str = "latest/redisson_lock/docs/";
    let source = read("src/docs.rs");
    let mut wrong = Vec::new();
    let mut links = 0;
    for document in documents() {
        for target in targets(&read(&document)) {
            let Some(rest) = target.strip_prefix(PUBLISHED) else {
                continue;
            };
            links += 1;
            let page = rest.strip_prefix(PAGES);
            let page = page.and_then(|page| page.strip_suffix("index.html"));
            let exists = page.is_some_and(|page| match page.strip_suffix('/') {
                None => page.is_empty(),
                Some(page) => source.contains(&format!("//! | [`{page}`] |")),
            });
            if !exists {
                wrong.push(format!("{}: {target}", document.display()));
            }
        }
    }
    assert!(links > 0, "no link was found");
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A reference leads to a file in the repository and to an item in rustdoc, and both are one page.
#[test]
fn references_lead_to_the_same_page_in_the_repository_and_in_rustdoc() {
    let source = read("src/docs.rs");
    let mut wrong = Vec::new();
    for page in files("docs", "md") {
        let text = read(&page);
        let file = page.file_name().unwrap().to_str().unwrap();
        let module = file.replace(".md", "").replace('-', "_");
        if !source.contains(&format!("{module} \"{file}\""))
            && !source.contains(&format!("include_str!(\"../docs/{file}\")"))
        {
            wrong.push(format!("src/docs.rs has no page of {file}"));
        }
        for (reference, target) in prose(&text).filter_map(definition) {
            let item = target.replace(".md", "").replace('-', "_");
            // Only the name of the page has underscores, not the heading.
            let item = match target.split_once('#') {
                Some((_, anchor)) => format!("{}#{anchor}", item.split('#').next().unwrap()),
                None => item,
            };
            let line = format!("#[doc = \"[{reference}]: crate::docs::{item}\"]");
            if !is_elsewhere(target) && !source.contains(&line) {
                wrong.push(format!("{file}: src/docs.rs lacks {line}"));
            }
        }
        // An inline link to a file would be dead in rustdoc.
        let inline = prose(&text).flat_map(|line| line.split("](").skip(1));
        for rest in inline.filter(|rest| !rest.starts_with('#') && !is_elsewhere(rest)) {
            wrong.push(format!("{file}: an inline link to {rest}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// What `tracing::LEVEL!(FIELDS, "MESSAGE")` logs.
struct LogEvent {
    level: &'static str,
    fields: Vec<String>,
    message: String,
}

fn log_events(source: &str) -> Vec<LogEvent> {
    let mut events = Vec::new();
    for level in ["error", "warn", "info", "debug", "trace"] {
        for call in source.split(&format!("tracing::{level}!(")).skip(1) {
            let call = call.split(");").next().unwrap();
            let (fields, message) = call.split_once('"').unwrap_or((call, ""));
            let fields = fields.split(',').map(|field| {
                let name = field.split('=').next().unwrap().trim();
                name.trim_start_matches(['%', '?']).to_owned()
            });
            events.push(LogEvent {
                level,
                fields: fields.filter(|name| !name.is_empty()).collect(),
                message: message.split('"').next().unwrap().to_owned(),
            });
        }
    }
    events
}

#[test]
fn operations_md_has_each_log_event_setting_and_counter() {
    let page = read("docs/operations.md");
    let mut missing = Vec::new();
    let mut count = 0;
    for file in files("src", "rs") {
        for event in log_events(&fs::read_to_string(&file).unwrap()) {
            count += 1;
            let row = format!("| {} | {} |", event.level, event.message);
            let row = page.lines().find_map(|line| line.strip_prefix(&row));
            let row = row.filter(|_| !event.message.is_empty());
            let fields = row.and_then(|row| row.split('|').next());
            let documented = |field: &String| {
                fields.is_some_and(|fields| fields.contains(&format!("`{field}`")))
            };
            if row.is_none() || !event.fields.iter().all(documented) {
                let LogEvent {
                    level,
                    fields,
                    message,
                } = event;
                missing.push(format!(
                    "{}: {level} {message:?} {fields:?}",
                    file.display()
                ));
            }
        }
    }
    assert!(count > 10, "only {count} events were found");

    let client = read("src/client.rs");
    let settings = client.lines().filter(|line| line.contains("(mut self, "));
    let settings = settings.filter_map(|line| line.trim().strip_prefix("pub fn "));
    let settings: Vec<_> = settings.filter_map(|line| line.split('(').next()).collect();
    assert!(settings.len() > 5, "{settings:?}");

    let stats = read("src/stats.rs");
    let fields = stats
        .lines()
        .filter_map(|line| line.trim().strip_prefix("pub ")?.split_once(": "));
    let fields: Vec<_> = fields.map(|(field, _)| field).collect();
    assert!(fields.len() > 10, "{fields:?}");

    for name in settings.iter().chain(&fields) {
        if !page.contains(&format!("`{name}`")) {
            missing.push((*name).to_owned());
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn readme_has_each_error() {
    let source = read("src/error.rs");
    let variants = source.split_once("pub enum Error {\n").unwrap().1;
    let variants = variants.split("\n}").next().unwrap().lines();
    let variants = variants.filter_map(|line| line.strip_prefix("    "));
    let variants = variants.filter(|line| line.starts_with(|c: char| c.is_ascii_uppercase()));
    let variants = variants.map(|line| line.trim_end_matches([' ', '{', ',']));
    let variants: Vec<_> = variants.collect();
    assert!(variants.len() > 10, "{variants:?}");
    let readme = read("README.md");
    let rows: String = readme
        .lines()
        .filter(|line| line.starts_with("| `"))
        .collect();
    let missing = variants
        .iter()
        .filter(|variant| !rows.contains(&format!("`{variant}`")));
    let missing: Vec<_> = missing.collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// The code between `// region: NAME` and `// endregion`, without its indentation.
fn region(file: &str, name: &str) -> String {
    let text = read(file);
    let begin = format!("// region: {name}");
    let lines = text.lines().skip_while(|line| line.trim() != begin).skip(1);
    let lines: Vec<_> = lines
        .take_while(|line| line.trim() != "// endregion")
        .collect();
    assert!(!lines.is_empty(), "{file} has no region {name:?}");
    let filled = lines.iter().filter(|line| !line.is_empty());
    let indent = filled
        .map(|line| line.len() - line.trim_start().len())
        .min();
    let lines = lines
        .iter()
        .map(|line| line.get(indent.unwrap()..).unwrap_or_default());
    lines.map(|line| format!("{line}\n")).collect()
}

#[test]
fn recipes_md_shows_the_code_of_the_recipes() {
    let page = read("docs/recipes.md");
    let mut shown = 0;
    for part in page.split("<!-- ").skip(1) {
        let (marker, rest) = part.split_once(" -->\n").unwrap();
        let (file, name) = marker.split_once(": ").unwrap();
        let code = rest
            .strip_prefix("```rust\n")
            .and_then(|code| code.split("```").next());
        assert_eq!(code, Some(&*region(file, name)), "{marker}");
        shown += 1;
    }
    assert_eq!(page.matches("```rust").count(), shown, "code of no recipe");
    for file in files("examples/recipes", "rs") {
        let name = file.file_name().unwrap().to_str().unwrap();
        assert!(
            page.contains(&format!("<!-- examples/recipes/{name}: ")),
            "{name}"
        );
    }
}

#[test]
fn tests_named_in_safety_md_exist() {
    let root = env!("CARGO_MANIFEST_DIR");
    let text = std::fs::read_to_string(format!("{root}/docs/safety.md")).unwrap();
    let mut missing = Vec::new();
    let mut count = 0;
    let tables = text
        .split("\n\n")
        .filter(|table| table.starts_with("| fault |"));
    for row in tables.flat_map(str::lines).skip(2) {
        let Some(tests) = row.trim_end_matches([' ', '|']).rsplit('|').next() else {
            continue;
        };
        let words: Vec<_> = tests.split('`').collect();
        let mut file = None;
        for word in words.iter().skip(1).step_by(2) {
            count += 1;
            let places = [
                format!("it/{word}.rs"),
                format!("{word}/main.rs"),
                format!("model/{word}/mod.rs"),
                format!("../src/{word}/mod.rs"),
            ];
            let text = places
                .iter()
                .find_map(|place| std::fs::read_to_string(format!("{root}/tests/{place}")).ok());
            match text {
                Some(text) => file = Some((*word, text)),
                None => match &file {
                    Some((_, text))
                        if text.lines().any(|l| l.contains("fn ") && l.contains(word)) => {}
                    _ => missing.push(format!("{:?}: {word}", file.as_ref().map(|f| f.0))),
                },
            }
        }
    }
    assert!(count > 100, "only {count} names were found");
    assert!(missing.is_empty(), "{missing:?}");
}

/// The benchmarks are a package of their own, so a command without it finds no benchmark.
#[test]
fn bench_commands_name_the_package_and_a_benchmark() {
    let manifest = read("benches/Cargo.toml");
    let package = manifest
        .lines()
        .find_map(|line| line.strip_prefix("name = "));
    let package = format!("--package {}", package.unwrap().trim_matches('"'));
    let mut wrong = Vec::new();
    let mut count = 0;
    for document in documents() {
        for line in read(&document).lines() {
            let Some((_, command)) = line.split_once("cargo bench") else {
                continue;
            };
            count += 1;
            let words: Vec<_> = command.split_whitespace().collect();
            let bench = words.iter().position(|word| *word == "--bench");
            let exists = bench.is_none_or(|at| {
                let target = words.get(at + 1).copied().unwrap_or_default();
                manifest.contains(&format!("[[bench]]\nname = \"{target}\"\n"))
            });
            if !command.contains(&package) || !exists {
                wrong.push(format!("{}: {line}", document.display()));
            }
        }
    }
    assert!(count >= 3, "only {count} commands were found");
    assert!(wrong.is_empty(), "{wrong:#?}");
}
