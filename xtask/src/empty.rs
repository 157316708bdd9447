//! An environment without Rust for tests of the binary packages: an empty folder that is also the home folder, and a PATH with
//! system folders only.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

const SYSTEM_FOLDERS: [&str; 2] = ["/usr/bin", "/bin"];

/// Returns true if the system folders contain cargo. The environment is then not without Rust.
pub(crate) fn system_has_rust() -> bool {
    SYSTEM_FOLDERS.iter().any(|folder| Path::new(folder).join("cargo").exists())
}

/// An empty folder, removed on drop, and an environment in which this folder is `HOME` and the current folder.
pub(crate) struct Empty {
    pub(crate) folder: PathBuf,
}

impl Empty {
    pub(crate) fn create() -> Result<Self> {
        // The path of the folder is short, because programs create Unix sockets in the folder, whose paths are limited to 107
        // bytes.
        let folder = env::temp_dir().join(format!("wholemem-empty-{}", std::process::id()));
        fs::create_dir(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        Ok(Self { folder })
    }

    /// Returns a command that runs `program` in the empty folder. Its PATH has the folder of the program and the system
    /// folders.
    pub(crate) fn command(&self, program: &Path) -> Result<Command> {
        let bin = program.parent().context("the path of the program has no parent folder")?;
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
        // `drop` cannot return an error; a folder that cannot be removed stays in the temporary folder.
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
