//! An environment without Rust, in which what is distributed is tried: an empty folder, which is the home too, and a path with
//! the system's folders alone.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

const SYSTEM_FOLDERS: [&str; 2] = ["/usr/bin", "/bin"];

/// Whether the system's own folders have Rust: then the environment is not without it.
pub(crate) fn system_has_rust() -> bool {
    SYSTEM_FOLDERS.iter().any(|folder| Path::new(folder).join("cargo").exists())
}

/// A folder that goes with it, and an environment with nothing in it but the folder as the home.
pub(crate) struct Empty {
    pub(crate) folder: PathBuf,
}

impl Empty {
    pub(crate) fn create() -> Result<Self> {
        // Short, since sockets are made in it.
        let folder = env::temp_dir().join(format!("wholemem-empty-{}", std::process::id()));
        fs::create_dir(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        Ok(Self { folder })
    }

    /// A command in the folder, whose path has the command's own folder and the system's alone.
    pub(crate) fn command(&self, program: &Path) -> Result<Command> {
        let bin = program.parent().context("a program lies in a folder")?;
        let mut command = Command::new(program);
        command.env_clear().current_dir(&self.folder);
        command
            .env("HOME", &self.folder)
            .env("PATH", format!("{}:{}", bin.display(), SYSTEM_FOLDERS.join(":")));
        Ok(command)
    }
}

impl Drop for Empty {
    fn drop(&mut self) {
        // A folder that cannot be removed is a trace that the last steps report.
        drop(fs::remove_dir_all(&self.folder));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_environment_has_no_rust_and_leaves_nothing() {
        let empty = Empty::create().unwrap();
        let folder = empty.folder.clone();
        let mut command = empty.command(Path::new("/usr/bin/env")).unwrap();
        let printed = String::from_utf8(command.output().unwrap().stdout).unwrap();
        assert_eq!(printed, format!("HOME={}\nPATH=/usr/bin:/usr/bin:/bin\n", folder.display()));
        drop(empty);
        assert!(!folder.exists());
    }
}
