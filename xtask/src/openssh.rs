//! Finds an ssh server for the tests of `wholemem launch --hosts`: an installed one, or Debian's package unpacked in `target/`.
//!
//! Without one, these tests are skipped.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::{command, debian};

const FOLDER: &str = "target/tools/openssh";

/// The packages with the server, and the library that only it needs.
const PACKAGES: [&str; 3] = ["openssh-server", "openssh-client", "libwrap0"];

/// The program of an installed server.
const INSTALLED: &str = "/usr/sbin/sshd";

/// Returns the environment variables with which the tests find the server. If there is none and it cannot be downloaded, the
/// error is a [`Skip`](crate::toolchain::Skip).
pub(crate) fn environment() -> Result<Vec<(&'static str, OsString)>> {
    let has_client = command::succeeds(Command::new("ssh").arg("-V"));
    if has_client && Path::new(INSTALLED).is_file() {
        return Ok(Vec::new());
    }
    let root = debian::fetch("OpenSSH", FOLDER, &PACKAGES, "apt-get install openssh-server")?;
    let mut variables = vec![
        ("WHOLEMEM_TEST_SSHD", root.join("usr/sbin/sshd").into()),
        ("WHOLEMEM_TEST_SSHD_LIBRARIES", debian::libraries(&root).into()),
    ];
    if !has_client {
        let paths = std::env::var_os("PATH").unwrap_or_default();
        let paths = std::env::split_paths(&paths).chain([root.join("usr/bin")]);
        variables.push(("PATH", std::env::join_paths(paths)?));
    }
    Ok(variables)
}
