//! Tests of completions and manual pages.

use std::process::Command;

use crate::run::{finish, program, run};

#[test]
fn completions_are_scripts_that_their_shells_accept() {
    for (shell, check) in [("bash", "bash"), ("zsh", "zsh"), ("fish", "fish")] {
        // The script does not fit in a pipe.
        let output = program(&["completions", shell]).output().unwrap();
        assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]), "{shell}");
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(script.contains("safetensors") && script.contains("drafts"), "{shell}");
        assert!(!script.contains("peer"), "internal commands: {shell}");
        let folder = tempfile::tempdir_in("/tmp").unwrap();
        let path = folder.path().join("script");
        std::fs::write(&path, script).unwrap();
        // Only bash is on every machine that runs this test.
        if let Ok(checked) = Command::new(check).arg("-n").arg(&path).output() {
            assert!(checked.status.success(), "{shell}: {checked:?}");
        } else {
            assert_ne!(shell, "bash");
        }
    }
}

#[test]
fn every_visible_command_has_a_manual_page() {
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    let mut command = program(&["man", "--dir"]);
    command.arg(folder.path());
    assert_eq!(finish(command).code, Some(0));
    let mut names: Vec<_> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let help = run(&["--help"]).stdout;
    let commands = help.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let commands = commands.filter_map(|line| line.split_whitespace().next());
    for command in commands.filter(|command| !command.starts_with('-') && *command != "help") {
        assert!(names.contains(&format!("wholemem-{command}.1")), "{command}: {names:?}");
    }
    assert!(names.contains(&"wholemem-bench-gather.1".to_owned()));
    assert!(names.iter().all(|name| !name.contains("peer") && !name.contains("rank")), "{names:?}");
    let page = std::fs::read_to_string(folder.path().join("wholemem-ls.1")).unwrap();
    assert_eq!(page, run(&["man", "ls"]).stdout);
    assert!(page.contains(".TH WHOLEMEM-LS 1") && page.contains("\\-\\-drafts"), "{page}");
}

#[test]
fn the_help_and_the_manual_of_a_command_are_found_by_its_name() {
    assert_eq!(run(&["help", "rm"]).stdout, run(&["rm", "--help"]).stdout);
    let missing = run(&["man", "peer"]);
    let error = "error: there is no command `wholemem peer`\n";
    assert_eq!((missing.code, missing.stderr.as_str()), (Some(1), error));
}
