//! Why there is no CUDA backend here: the driver's library is looked for, and what was found is told.

/// The library of the driver, as the dynamic loader knows it.
const DRIVER: &str = "libcuda.so.1";

/// The reason that CUDA cannot be used, for people.
///
/// The library is loaded and let go again; none of its functions is called, so nothing is initialized.
pub(crate) fn absence() -> String {
    // SAFETY: loading the driver's library runs its initializers, which is what every CUDA program does.
    match unsafe { libloading::Library::new(DRIVER) } {
        Ok(_) => format!("`{DRIVER}` is here, but this version of wholemem does not speak to it yet"),
        Err(error) => {
            let source = std::error::Error::source(&error).map(ToString::to_string);
            format!("no NVIDIA driver was found ({})", source.unwrap_or_else(|| error.to_string()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_names_the_library() {
        assert!(absence().contains(DRIVER), "{}", absence());
    }
}
