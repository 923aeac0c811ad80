/** The public names of the client. */

export { PushpullClient, Table } from './client.js';
export { PushpullError } from './errors.js';
