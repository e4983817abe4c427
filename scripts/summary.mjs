// Adds up the result files of .test-results and prints one line, `N passed, N failed, N skipped`; arguments are the
// files that must be there. Exits 1 when anything failed. Plain JavaScript: it also runs when the installation failed.
import { readFileSync } from 'node:fs';

/** @returns {{ passed: number, failed: number, skipped: number }} */
function countsOf(file) {
  let result;
  try {
    result = JSON.parse(readFileSync(file, 'utf8'));
  } catch {
    // A run that ended without its result is a failure.
    return { passed: 0, failed: 1, skipped: 0 };
  }
  const { numPassedTests: passed, numFailedTests, numPendingTests, numTodoTests = 0, success } = result;
  // A file that does not load, or an error outside of any test, has no failed test of its own; nor has a run that broke
  // before its first test.
  const isWhole = success && passed + numPendingTests + numTodoTests > 0;
  const failed = isWhole ? numFailedTests : Math.max(numFailedTests, 1);
  return { passed, failed, skipped: numPendingTests + numTodoTests };
}

const total = { passed: 0, failed: 0, skipped: 0 };
for (const file of process.argv.slice(2)) {
  const counts = countsOf(file);
  for (const key of Object.keys(total)) total[key] += counts[key];
}
process.stdout.write(`${total.passed} passed, ${total.failed} failed, ${total.skipped} skipped\n`);
process.exitCode = total.failed > 0 ? 1 : 0;
