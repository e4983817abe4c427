import type { FastifyRequest } from 'fastify';
import { isLoopback } from '../config/instance-url.ts';
import { BatonError } from '../core/errors.ts';
import { operatorRequired } from '../services/credential.ts';
import type { StoreCaller } from '../services/kv-store-arguments.ts';

/** By what operators are told from others on the admin port. */
export interface OperatorGate {
  /** Tells who calls; a BatonError when what they show is not enough. */
  readonly callerOf: (authorization: string | undefined) => StoreCaller | BatonError;
  /** Whether callers show tokens; without them only this machine may change something, whoever else reaches the port. */
  readonly hasTokens: boolean;
}

/** Throws what a caller is refused with: no page of another site, no caller without a token where tokens are wanted. */
export function admit(
  { callerOf, hasTokens }: OperatorGate,
  { headers, ip, method, routeOptions }: FastifyRequest,
): void {
  const { authorization, host, origin } = headers;
  const caller = callerOf(authorization);
  if (caller instanceof BatonError) throw caller;
  if (method === 'GET' || method === 'HEAD') return;
  const isNear = hasTokens || isLoopback(ip.replace(/^::ffff:/, ''));
  const isForeign = origin !== undefined && !isOwnPage(origin, host, hasTokens);
  if (!caller.isOperator || !isNear || isForeign) throw operatorRequired(`${method} ${routeOptions.url ?? ''}`);
}

/** Browsers tell whose page asks. Without tokens a name that leads to this machine is not enough: anybody can have one. */
function isOwnPage(origin: string, host: string | undefined, hasTokens: boolean): boolean {
  if (!URL.canParse(origin)) return false;
  const page = new URL(origin);
  return page.host === host && (hasTokens || isLoopback(page.hostname.replace(/^\[(.*)\]$/, '$1')));
}
