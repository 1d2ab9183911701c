export * from './fs.js';
import * as fs from './fs.js';
export default fs;
