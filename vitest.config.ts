import { defineConfig } from 'vitest/config';

// One result file per npm script (test.json, test-ci.json, ...), so that .ci/run can add them up.
const run = (process.env['npm_lifecycle_event'] ?? 'vitest').replaceAll(/[^a-z0-9]+/gi, '-');

function project(name: string, include: string, testTimeout: number, ...globalSetup: readonly string[]) {
  const test = { name, include: [include], testTimeout, hookTimeout: testTimeout, globalSetup: [...globalSetup] };
  return { extends: true as const, test };
}

function alone({ test, ...rest }: ReturnType<typeof project>) {
  return { ...rest, test: { ...test, maxWorkers: 1, sequence: { groupOrder: 1 } } };
}

export default defineConfig({
  test: {
    environment: 'node',
    // Child processes: a test that leaks a handle or changes process state cannot harm another file.
    pool: 'forks',
    maxWorkers: 2,
    teardownTimeout: 10_000,
    restoreMocks: true,
    unstubEnvs: true,
    reporters: ['default', 'json'],
    outputFile: { json: process.env['BATON_TEST_RESULTS'] ?? `.test-results/${run}.json` },
    projects: [
      project('unit', 'test/unit/**/*.test.ts', 5_000),
      project('contract', 'test/contract/**/*.test.ts', 15_000),
      project('e2e', 'test/e2e/**/*.test.ts', 30_000),
      project('conformance', 'test/conformance/**/*.test.ts', 60_000),
      project('executable', 'test/{e2e,executable}/**/*.test.ts', 60_000, 'test/support/build-executable.ts'),
      project('long', 'test/long/*.test.ts', 300_000),
      // After all others and one by one: where they take the processor, engines stand still that the test wants to run.
      alone(project('alone', 'test/long/alone/*.test.ts', 300_000)),
      project('soak', 'test/long/**/*.soak.ts', 3_600_000),
      project('real', 'test/real/**/*.test.ts', 900_000),
    ],
  },
});
