//! Writes the manual pages of the program and its completions for shells, for the packages.
//!
//! The program writes them itself, so this machine builds and runs it, whatever the architecture of the package is.

use std::fs;
use std::path::Path;

use anyhow::Result;

use crate::command;

/// Writes manual pages and completions to the folder `share` of a package. `zsh` is the folder in it from which zsh loads functions.
pub(crate) fn write(share: &Path, zsh: &str) -> Result<()> {
    let program = || {
        let mut cargo = command::cargo();
        cargo.args(["run", "--quiet", "--locked", "--package", "wholemem-cli", "--"]);
        cargo
    };
    command::run(program().args(["man", "--dir"]).arg(share.join("man/man1")))?;
    let scripts = [
        ("bash", "bash-completion/completions".to_owned(), "wholemem"),
        ("zsh", format!("zsh/{zsh}"), "_wholemem"),
        ("fish", "fish/vendor_completions.d".to_owned(), "wholemem.fish"),
    ];
    for (shell, folder, name) in scripts {
        let script = command::capture(program().args(["completions", shell]))?;
        fs::create_dir_all(share.join(&folder))?;
        fs::write(share.join(&folder).join(name), script)?;
    }
    Ok(())
}
