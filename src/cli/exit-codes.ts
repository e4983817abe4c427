/** Exit codes of every command: done; it could not be done; a mistake in the command line or the settings. */
export const OK = 0;
export const FAILED = 1;
export const USAGE = 2;
