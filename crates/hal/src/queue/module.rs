//! Kernels loaded on a device, and looked up by name.

use std::sync::Arc;

use crate::backend::{Operand, Owned, Teardown};
use crate::raw::{RawFunction, RawModule};
use crate::{Attempt, Backend, Device, Error, KernelImage, Result};

/// Kernels loaded on a device.
#[derive(Debug, Clone)]
#[doc(alias = "CUmodule")]
pub struct Module {
    core: Arc<ModuleCore>,
}

#[derive(Debug)]
struct ModuleCore {
    owned: Owned,
    device: Device,
    raw: RawModule,
}

impl Module {
    /// Loads kernels. Load them when a device is opened: some drivers wait here for kernels that run.
    ///
    /// # Errors
    /// [`Error::Failed`] with the driver's words.
    ///
    /// # Safety
    /// The image's functions are what their launchers take them for.
    pub unsafe fn load(device: &Device, image: &KernelImage) -> Result<Self> {
        let attempt = || Attempt::LoadModule { device: device.label() };
        let backend = device.backend();
        backend.check_fork(attempt)?;
        // SAFETY: the device exists, this is no forked child, and the caller answers for the image.
        let raw = unsafe { backend.queue().load_module(device.id(), image) }
            .map_err(|cause| backend.refused(device.id(), attempt(), cause))?;
        let owned = Owned::new(backend, Teardown::UnloadModule(raw));
        Ok(Self { core: Arc::new(ModuleCore { owned, device: device.clone(), raw }) })
    }

    /// One of its kernels.
    ///
    /// # Errors
    /// [`Error::NoSuchFunction`]; [`Error::Failed`].
    pub fn function(&self, name: &'static str) -> Result<Function> {
        let attempt = || Attempt::Launch { name };
        let backend = self.backend();
        backend.check_fork(attempt)?;
        // SAFETY: the module is live because `self` holds it.
        let raw = unsafe { backend.queue().function(self.core.raw, name) }
            .map_err(|cause| backend.refused(self.core.device.id(), attempt(), cause))?;
        match raw {
            Some(raw) => Ok(Function { module: self.clone(), name, raw }),
            None => Err(Error::NoSuchFunction { name: name.to_owned(), backend: backend.kind() }),
        }
    }

    fn backend(&self) -> &Backend {
        self.core.owned.backend()
    }
}

/// One kernel of a module, which it keeps loaded.
#[derive(Debug, Clone)]
#[doc(alias = "CUfunction")]
pub struct Function {
    module: Module,
    name: &'static str,
    raw: RawFunction,
}

impl Function {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The device it runs on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.module.core.device
    }

    /// How many blocks of `threads` threads run at once on the device, if nothing else does: blocks that wait for each
    /// other must all be among them.
    ///
    /// # Errors
    /// [`Error::Failed`].
    pub fn occupancy(&self, threads: u32, shared_len: u32) -> Result<u32> {
        let attempt = || Attempt::Launch { name: self.name };
        let backend = self.module.backend();
        backend.check_fork(attempt)?;
        // SAFETY: the function is live because its module is held.
        unsafe { backend.queue().occupancy(self.raw, threads, shared_len) }
            .map_err(|cause| backend.refused(self.device().id(), attempt(), cause))
    }

    pub(super) fn raw(&self) -> RawFunction {
        self.raw
    }

    /// What work that runs it holds.
    pub(super) fn operand(&self) -> Operand {
        Arc::<ModuleCore>::clone(&self.module.core)
    }
}
