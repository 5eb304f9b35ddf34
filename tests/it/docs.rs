//! The tests that docs/safety.md names exist.

#[test]
fn tests_named_in_safety_md_exist() {
    let root = env!("CARGO_MANIFEST_DIR");
    let text = std::fs::read_to_string(format!("{root}/docs/safety.md")).unwrap();
    let mut missing = Vec::new();
    for row in text.lines().filter(|l| l.starts_with('|')) {
        let Some(tests) = row.trim_end_matches([' ', '|']).rsplit('|').next() else {
            continue;
        };
        let words: Vec<_> = tests.split('`').collect();
        let mut file = None;
        for word in words.iter().skip(1).step_by(2) {
            let places = [
                format!("it/{word}.rs"),
                format!("{word}/main.rs"),
                format!("model/{word}/mod.rs"),
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
    assert!(missing.is_empty(), "{missing:?}");
}
