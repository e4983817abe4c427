/**
 * The parts of the executable and their CRC-32 sums. A checkout and a package have none; `scripts/executable.mjs` puts
 * others in the place of this file when it builds one.
 */
export const SUMS: Readonly<Record<string, number>> = {};
