/** One mistake in the settings, or a warning about them. */
export interface Problem {
  /** A flag (`--rpc-port`), a variable (`BATON_RPC_PORT`) or a place in a file (`baton.yaml:12:3`); empty if there is none. */
  readonly where: string;
  /** One sentence that says what to write instead. */
  readonly message: string;
}

/** Writes a problem as one line. */
export function formatProblem(problem: Problem): string {
  return problem.where === '' ? problem.message : `${problem.where}: ${problem.message}`;
}
