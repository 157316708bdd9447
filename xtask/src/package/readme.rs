//! Turns the Rust code blocks of a README into programs: one package for each README, one program for each block.
//!
//! A package depends only on the published crates that its blocks name, so a block that needs other dependencies does not
//! compile.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::tarballs::PublishedCrate;

/// A Rust code block of a README.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ReadmeBlock {
    /// The line number of the first line of code of the block.
    line: usize,
    /// True if the program is run, false if it is only compiled.
    pub(crate) runs: bool,
    code: String,
}

impl ReadmeBlock {
    /// Returns the name of the program for the code block in the package of a README.
    pub(crate) fn program(&self, package: &str) -> String {
        format!("{package}-line-{}", self.line)
    }
}

/// Returns the Rust code blocks of a README, without `ignore` and `compile_fail` blocks.
pub(crate) fn blocks(text: &str) -> Vec<ReadmeBlock> {
    let mut blocks = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((index, line)) = lines.next() {
        let Some(language) = line.strip_prefix("```") else { continue };
        let code: Vec<_> = lines.by_ref().map(|(_, line)| line).take_while(|line| *line != "```").collect();
        let mut words = language.split(',').map(str::trim);
        if words.next() != Some("rust") {
            continue;
        }
        let attributes: Vec<_> = words.collect();
        if attributes.contains(&"ignore") || attributes.contains(&"compile_fail") {
            continue;
        }
        let runs = !attributes.contains(&"no_run");
        blocks.push(ReadmeBlock { line: index + 2, runs, code: program(&code) });
    }
    blocks
}

/// Returns a code block as a program: hidden lines of rustdoc are included, and a `main` is added if there is none.
fn program(lines: &[&str]) -> String {
    let shown = |line: &&str| match line.strip_prefix("# ") {
        Some(hidden) => hidden.to_owned(),
        None if *line == "#" => String::new(),
        None => (*line).to_owned(),
    };
    let code = lines.iter().map(shown).collect::<Vec<_>>().join("\n");
    if code.contains("fn main()") {
        return code + "\n";
    }
    let has_result = lines.last().is_some_and(|line| line.trim_start_matches("# ").starts_with("Ok"));
    let result = if has_result { "" } else { "Ok::<(), Box<dyn std::error::Error>>(())\n" };
    let name = "Result<(), impl std::fmt::Debug>";
    format!("fn block() -> {name} {{\n{code}\n{result}}}\n\nfn main() {{\n    block().unwrap();\n}}\n")
}

/// Returns the published libraries that code blocks name.
fn crates_named_in<'a>(blocks: &[ReadmeBlock], published: &'a [PublishedCrate]) -> Vec<&'a PublishedCrate> {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let names = |krate: &&PublishedCrate| {
        let module = krate.name.replace('-', "_");
        let is_named_in =
            |block: &ReadmeBlock| block.code.split(|letter| !is_part(letter)).any(|word| word == module);
        krate.is_library && blocks.iter().any(is_named_in)
    };
    published.iter().filter(names).collect()
}

/// Writes a package with the programs of a README's code blocks.
pub(crate) fn write_package(
    folder: &Path,
    package: &str,
    blocks: &[ReadmeBlock],
    published: &[PublishedCrate],
) -> Result<()> {
    let mut manifest = format!("[package]\nname = \"{package}\"\nedition = \"2024\"\n\n[dependencies]\n");
    for krate in crates_named_in(blocks, published) {
        writeln!(manifest, "{} = \"{}\"", krate.name, krate.version)?;
    }
    let source = folder.join("src/bin");
    if source.is_dir() {
        fs::remove_dir_all(&source).with_context(|| format!("cannot remove {}", source.display()))?;
    }
    fs::create_dir_all(&source).with_context(|| format!("cannot create {}", source.display()))?;
    // cargo requires a target in each package, and a README may have no block, so there is an empty library.
    let mut files = vec![(folder.join("Cargo.toml"), manifest), (folder.join("src/lib.rs"), String::new())];
    for block in blocks {
        files.push((source.join(format!("{}.rs", block.program(package))), block.code.clone()));
    }
    for (path, text) in files {
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const README: &str = "# ours\n\n```rust\nuse ours_os::A;\nfn main() {}\n```\n\n```sh\nls\n```\n\n\
                          ```rust,no_run\nfn main() {\n}\n```\n\n```rust,ignore\n...\n```\n\n```python torch\nx\n```\n";

    fn published(name: &str, is_library: bool) -> PublishedCrate {
        let version = "0.1.0".to_owned();
        PublishedCrate { name: name.to_owned(), version, features: Vec::new(), is_library }
    }

    #[test]
    fn blocks_of_rust_become_programs_with_their_lines() {
        let found = blocks(README);
        let first = ReadmeBlock { line: 4, runs: true, code: "use ours_os::A;\nfn main() {}\n".to_owned() };
        let second = ReadmeBlock { line: 13, runs: false, code: "fn main() {\n}\n".to_owned() };
        assert_eq!(found, [first, second]);
        assert_eq!(found[0].program("readme-of-ours"), "readme-of-ours-line-4");
    }

    #[test]
    fn a_block_without_main_gets_one() {
        let found = blocks("```rust\nlet a = f()?;\n# g(a)?;\n```\n");
        assert!(
            found[0]
                .code
                .starts_with("fn block() -> Result<(), impl std::fmt::Debug> {\nlet a = f()?;\ng(a)?;\nOk")
        );
        assert!(found[0].code.contains("fn main() {"));
        let found = blocks("```rust\nf()?;\n# Ok::<(), ours::Error>(())\n```\n");
        assert_eq!(found[0].code.matches("Ok::<").count(), 1);
    }

    #[test]
    fn a_package_depends_on_the_crates_that_its_blocks_name() {
        let published = [published("ours", true), published("ours-os", true), published("ours-cli", false)];
        let blocks = blocks(README);
        let names: Vec<_> =
            crates_named_in(&blocks, &published).iter().map(|krate| krate.name.as_str()).collect();
        assert_eq!(names, ["ours-os"]);
    }
}
