;;;; Appending from many threads, and flushing: sinks, appenders, record files.

(in-package #:pelton)

;;; ---- Sinks

(defstruct (sink (:copier nil) (:predicate nil))
  "A function of Lisp's that takes what is flushed."
  (function #'identity :type function)
  ;; By which it was left last, if that was a condition.
  (cause nil))

(defvar *sinks* (make-hash-table :synchronized t) "Those in use, by number.")
(defvar *next-sink* (list 0))
(declaim (type cons *next-sink*))

(defstruct (runs (:copier nil) (:predicate nil) (:constructor %make-runs (address count)))
  "What a sink is given: so many runs of records. Good until the sink returns."
  (address 0 :type word)
  (count 0 :type (unsigned-byte 32)))

(defmacro do-runs (((sap size &key messages first-seq lane-id pid uid) runs &key result) &body body)
  "Runs BODY with each run: SIZE bytes at SAP, which are whole records of one thread or sender, back to back. For each message there is a
header, a little-endian word of its number << 32 | its size; its bytes; and up to seven more, so that the next begins at a multiple of 8. The
other names are variables for how many messages there are, the number of the first, an integer that tells the lane from any other that ever was,
and the process and user of the sender. In a block named nil."
  (let ((at (gensym "AT")) (each (gensym "RUNS")))
    `(let ((,each ,runs))
       (loop for ,at of-type word from (runs-address ,each) by 48
             repeat (runs-count ,each)
             do (let ((,sap (sap-ref-sap (int-sap ,at) 16))
                      (,size (ldb (byte 62 0) (sap-ref-64 (int-sap ,at) 24)))
                      ,@(when first-seq `((,first-seq (sap-ref-32 (int-sap ,at) 32))))
                      ,@(when messages `((,messages (sap-ref-32 (int-sap ,at) 36))))
                      ,@(when lane-id `((,lane-id (logior (sap-ref-64 (int-sap ,at) 0) (ash (sap-ref-64 (int-sap ,at) 8) 64)))))
                      ,@(when pid `((,pid (sap-ref-32 (int-sap ,at) 40))))
                      ,@(when uid `((,uid (sap-ref-32 (int-sap ,at) 44)))))
                  (declare (ignorable ,sap ,size))
                  ,@body)
             finally (return ,result)))))

(defmacro do-records (((sap size &key seq) runs &key result) &body body)
  "Runs BODY with each message of all runs, in their order: its SIZE bytes at SAP, and its number. Signals CORRUPT-ERROR at a record that is not
what it must be, as only a sender in another process can cause. In a block named nil."
  (let ((bytes (gensym "BYTES")) (end (gensym "END")) (at (gensym "AT")) (header (gensym "HEADER")) (next (gensym "NEXT"))
        (first (gensym "FIRST")) (records (gensym "RECORDS")))
    `(do-runs ((,bytes ,end :first-seq ,first) ,runs :result ,result)
       (let ((,at 0) (,next ,first))
         (declare (type (unsigned-byte 62) ,at) (type (unsigned-byte 32) ,next))
         ;; Named, so that the block named nil is the one around it.
         (loop named ,records
               while (< ,at ,end)
               do (when (< (- ,end ,at) 8) (broken-record))
                  ;; Looked at once.
                  (let* ((,header (sap-ref-64 ,bytes ,at))
                         (,size (ldb (byte 32 0) ,header))
                         (,sap (sap+ ,bytes (+ ,at 8))))
                    (declare (ignorable ,sap))
                    (unless (and (= (ldb (byte 32 32) ,header) ,next) (<= ,size (- ,end ,at 8)))
                      (broken-record))
                    (setf ,at (+ ,at 8 (logandc2 (+ ,size 7) 7)))
                    (let (,@(when seq `((,seq ,next))))
                      ,@body)
                    (setf ,next (if (= ,next #xffffffff) 1 (1+ ,next)))))))))

(defun broken-record ()
  (error 'corrupt-error :code +corrupt+ :detail "a record of a run is not what it must be: its sender has written after it committed"))

(define-alien-callable write-to-sink int ((context unsigned-long) (runs unsigned-long) (count unsigned-long))
  (call-sink context runs count))

(defun call-sink (number address count)
  "Has the sink take the runs. Answers 0, or less if it was left in any way: nothing of Lisp's unwinds through the library."
  (let ((sink (gethash number *sinks*)) (left t))
    (setf (sink-cause sink) nil)
    (block nil
      (without-interrupts
        (unwind-protect
             (handler-case
                 (progn
                   (funcall (sink-function sink) (%make-runs address count))
                   (setf left nil))
               (serious-condition (condition)
                 (setf (sink-cause sink) condition)))
          (return (if left -5 0)))))))                  ; EIO

(deftype foreign-sink () "A function of C's, as pelton.h describes pelton_write, and its context." '(cons system-area-pointer word))

(defstruct (record-file (:copier nil) (:constructor %make-record-file))
  "A sink: see the function RECORD-FILE."
  path rotate-bytes sync-bytes sync-interval)

(defun record-file (path &key rotate-bytes sync-bytes sync-interval)
  "A sink that is a file, which MAP-RECORD-FILE and `pelton cat` read. It is made if it is not there, else gone on with: what a killed writer
left torn is cut off.
:ROTATE-BYTES a write that would make it larger begins a new one: FILE is renamed to FILE.000001 and so on.
:SYNC-BYTES fdatasync each time that so many more bytes are written, which later writes do not wait for; or :EACH-WRITE.
:SYNC-INTERVAL fdatasync so many seconds after something was written."
  (%make-record-file :path path :rotate-bytes rotate-bytes :sync-bytes sync-bytes :sync-interval sync-interval))

(defun call-with-sink (function sink made)
  "Calls FUNCTION with the SAP of a pelton_sink, and answers the handle that it makes, or signals its condition. MADE is the SINK of a function of
Lisp's, else nil."
  (let ((number nil)
        (result nil)
        (path (if (typep sink 'record-file)
                  (coerce (sb-ext:string-to-octets (native (record-file-path sink)) :external-format :utf-8 :null-terminate t) 'octets)
                  (make-octets 0))))
    (with-pinned-objects (path)
      (with-words (sap 7)
        (setf (sap-ref-32 sap 0) 56)
        (etypecase sink
          (function
           (setf number (sb-ext:atomic-incf (car *next-sink*))
                 (gethash number *sinks*) made
                 (sap-ref-sap sap 8) (alien-sap (alien-callable-function 'write-to-sink))
                 (sap-ref-64 sap 16) number))
          (foreign-sink
           (setf (sap-ref-sap sap 8) (car sink)
                 (sap-ref-64 sap 16) (cdr sink)))
          (record-file
           (with-accessors ((rotate record-file-rotate-bytes) (sync record-file-sync-bytes) (interval record-file-sync-interval)) sink
             (setf (sap-ref-sap sap 24) (vector-sap path)
                   (sap-ref-64 sap 32) (or rotate 0)
                   (sap-ref-64 sap 40) (case sync ((nil) 0) (:each-write (1- (expt 2 64))) (t sync))
                   (signed-sap-ref-64 sap 48) (if interval (seconds-to-ns interval) 0)))))
        (unwind-protect (setf result (funcall function sap))
          (unless (typep result 'handle)
            (when number (remhash number *sinks*))))
        (check result)))))

;;; ---- Appending
;;;
;;; A thread finds its appender in a table of its appenders by hashing, without a lock: an entry never changes, and is found by whoever looks
;;; from its hash on, for places are never emptied. Who comes new puts its own, under the lock, in a place that is empty or whose thread
;;; has ended; more threads than half the places there cannot be, for the library has 1024 appenders.

(defstruct (own (:include handle) (:copier nil) (:predicate nil) (:constructor make-own (thread address sink)))
  "The appender of a thread; nil for a thread where there was one. Its address is 0 when the appenders are closed."
  (thread nil :read-only t)
  (sink nil :read-only t))

(defconstant +places-bits+ 11)
(defconstant +places+ (ash 1 +places-bits+))

(define-handle appenders ((places (make-array +places+ :initial-element nil) :type (simple-vector #.+places+))
                          (lock (sb-thread:make-mutex :name "pelton appenders") :type sb-thread:mutex)
                          (sink nil :type (or null sink)))
  "What any thread appends by at any time: each has a buffer of its own, made when it first appends, and given up after the thread has ended,
by the next thread that begins, or the next FLUSH.")

(define-handle flushing ((sink nil :type (or null sink)))
  "What takes all that a receiver receives to a sink: see OPEN-FLUSH.")

(declaim (inline place-of-thread))
(defun place-of-thread ()
  "Where to look first: the thread's structure stays where it is, and no two threads have the same at a time."
  (ldb (byte +places-bits+ (- 64 +places-bits+))
       (ldb (byte 64 0) (* (the word (sap-int (sb-vm::current-thread-offset-sap sb-vm::thread-this-slot))) #x9e3779b97f4a7c15))))

(defun look-for-appender (places place)
  "What the calling thread appends by, from PLACE on, or nil if it has not begun to."
  (declare (type (simple-vector #.+places+) places) (type (unsigned-byte 16) place))
  ;; In time each place may have been somebody's.
  (loop repeat +places+
        do (let ((own (svref places place)))
             (cond ((null own) (return nil))
                   ((eq (own-thread own) sb-thread:*current-thread*) (return own))))
           (setf place (logand (1+ place) (1- +places+)))))

(declaim (inline own-appender))
(defun own-appender (appenders)
  "What the calling thread appends by, or nil if it has not begun to."
  (declare (type appenders appenders))
  (let* ((places (appenders-places appenders)) (place (place-of-thread)) (own (svref places place)))
    ;; There is nothing else in the places, and it is where it was looked for first, mostly.
    (sb-ext:truly-the (or null own)
                      (if (and own (eq (own-thread (sb-ext:truly-the own own)) sb-thread:*current-thread*))
                          own
                          (look-for-appender places place)))))

(defun join (appenders)
  "Makes the calling thread's appender; answers it, or what ATTEMPT answers."
  (let ((places (appenders-places appenders)))
    (without-interrupts
      (sb-thread:with-mutex ((appenders-lock appenders))
        (reap places)
        (with-words (out 1)
          (let ((result (attempt (%appender-open (handle-address appenders) out))))
            (if (eql result 0)
                (loop with own = (make-own sb-thread:*current-thread* (sap-ref-64 out 0) (appenders-sink appenders))
                      for place = (place-of-thread) then (logand (1+ place) (1- +places+))
                      for found = (svref places place)
                      when (or (null found) (null (own-thread found)))
                        do (return (setf (svref places place) own)))
                result)))))))

(defun reap (places)
  "Gives up what threads had that have ended. Under the lock."
  (loop for place from 0 below +places+
        for own = (svref places place)
        when (and own (own-thread own) (not (sb-thread:thread-alive-p (own-thread own))))
          do (setf (svref places place) (load-time-value (make-own nil 0 nil)))
             (close-own own)))

(defun close-own (own)
  (let ((address (shiftf (handle-address own) 0)))
    (unless (zerop address) (attempt (%close address)))))

(defun shut-appenders (places ticker number sink)
  "What closes appenders with these places, the function in TICKER that ends who flushes, and the sink of that number, each if it is not nil."
  (lambda (address)
    (when (car ticker) (funcall (car ticker)))
    ;; Closing would not tell what the sink does not take.
    (let ((synced (with-cause (attempt (%sync address)) sink))
          ;; Then who exits has left WITH-APPENDERS, and other threads have not: theirs stays good.
          (exiting sb-impl::*exit-in-progress*))
      (loop for own across places
            when (and own (own-thread own)
                      (or (not exiting)
                          (eq (own-thread own) sb-thread:*current-thread*)
                          (not (sb-thread:thread-alive-p (own-thread own)))))
              do (close-own own))
      (let ((closed (attempt (%close address))))
        (when (and number (not exiting)) (remhash number *sinks*))
        (if (eql synced 0) closed synced)))))

(defun tick (appenders interval)
  "Has a thread flush every so many seconds. Answers what ends that."
  (let* ((end (sb-thread:make-semaphore)) (pointer (sb-ext:make-weak-pointer appenders))
         (thread (sb-thread:make-thread
                  (lambda ()
                    (loop until (sb-thread:wait-on-semaphore end :timeout interval)
                          do (let ((appenders (sb-ext:weak-pointer-value pointer)))
                               (unless appenders (return))
                               (handler-case (flush appenders)
                                 ;; The sink has it again with the next flush.
                                 (pelton-error (condition)
                                   (when (handle-open-p appenders) (warn "~a" condition)))))))
                  :name "pelton flush")))
    (lambda ()
      (sb-thread:signal-semaphore end)
      (unless (eq thread sb-thread:*current-thread*)
        (sb-thread:join-thread thread :default nil)))))

(defun open-appenders (sink &key (flush-bytes (ash 1 20)) (flush-interval nil flush-interval-p) lanes message-bytes-max)
  "What threads of this process append by, each to a buffer of its own of :FLUSH-BYTES, which that thread hands to the sink itself when it is
full; headers count, 8 bytes for each message. :LANES is how many threads may append, 1024; the largest message is a buffer less 16
bytes, or :MESSAGE-BYTES-MAX.
SINK is one of
  a function of RUNS, which DO-RUNS and DO-RECORDS look at. It has taken all of them when it returns; if it is left in any other way, it has
    taken none, the same comes again with the next flush, and who flushed is told by SINK-ERROR; EXIT does not leave it either. It is called by
    one thread at a time, without interrupts, and neither uses these appenders, nor waits for a thread that does.
  a RECORD-FILE.
  (SAP . WORD), a function of C's as pelton.h describes pelton_write, and its context.
:FLUSH-INTERVAL so many seconds after something came the sink has it, too. nil: not by time. To a function of Lisp's that is the default, else
0.1; there a thread of Lisp's does it, every so many seconds.
Does not wait. Signals OPTION-ERROR, SYSTEM-ERROR, and, of a record file, ROLE-TAKEN-ERROR, DAMAGED-ERROR and others."
  (check-type flush-interval (or null (real (0))))
  (let* ((made (when (functionp sink) (make-sink :function sink)))
         (places (make-array +places+ :initial-element nil))
         (ticker (list nil))
         (number nil)
         (options (list* :flush-bytes flush-bytes :lanes lanes :message-bytes-max message-bytes-max
                         (cond (made '(:flush-interval nil))
                               (flush-interval-p `(:flush-interval ,flush-interval))))))
    (flet ((make (&key address)
             (%make-appenders :address address :places places :sink made
                              :shut (shut-appenders places ticker number made))))
      (let ((appenders (call-with-sink (lambda (sap)
                                         (when made (setf number (sap-ref-64 sap 16)))
                                         (with-options (options options)
                                           (opening (out make) (%appenders-open options sap out))))
                                       sink made)))
        (when (and made flush-interval)
          (unwind-protect (setf (car ticker) (tick appenders flush-interval))
            (unless (car ticker) (close-quietly appenders))))
        appenders))))

(defmacro with-appenders ((appenders sink &rest options) &body body)
  "Runs BODY with APPENDERS: see OPEN-APPENDERS. They are closed however BODY is left, and the sink has everything first: if it does not take that,
it is signalled where BODY has ended normally, else a warning. Threads that use them must have ended by then."
  `(with-handle (,appenders (open-appenders ,sink ,@options)) ,@body))

(defun with-cause (result from)
  "RESULT, with what the sink was left by if it is that: the SINK, or that of a handle; nil for one that is none of Lisp's."
  (when (typep result 'sink-error)
    (let ((sink (typecase from
                  (appenders (appenders-sink from))
                  (flushing (flushing-sink from))
                  (own (own-sink from))
                  (sink from))))
      (when sink (setf (slot-value result 'cause) (sink-cause sink)))))
  result)

(defun append-slowly (appenders address size tried)
  "As APPEND-MESSAGE, of SIZE bytes at ADDRESS. TRIED is what was answered already, or nil."
  (declare (type appenders appenders) (type word address) (type (unsigned-byte 62) size))
  (and (persisting (:what "append")
         (with-cause (or (shiftf tried nil)
                         (let ((own (or (own-appender appenders) (join appenders))))
                           (if (typep own 'own) (attempt (%append (handle-address own) (int-sap address) size)) own)))
                     appenders))
       t))

(declaim (inline append-sap))
(defun append-sap (appenders sap size)
  "As APPEND-MESSAGE, of SIZE bytes at SAP."
  (declare (type system-area-pointer sap) (type (unsigned-byte 62) size))
  (let* ((own (own-appender appenders))
         (tried (if own
                    (let ((address (handle-address own)))
                      (briefly (%append address sap size)))
                    nil)))
    (or (eql tried 0)
        (append-slowly appenders (sap-int sap) size tried))))

(declaim (inline append-message))
(defun append-message (appenders octets &key (start 0) end)
  "Appends the bytes of OCTETS from START to END, nil for its end, as a message, in the calling thread's own buffer: without a lock, a system
call, or any consing. Waits for nothing; but when the buffer is full this thread has the sink take it, and waits for that, and for
another thread that flushes. In the sink the messages of one thread are in order. Answers true. Any thread, at any time.
Signals TOO-LARGE-ERROR; REFUSED-ERROR for too many threads; of the sink SINK-ERROR, NO-SPACE-ERROR, SYSTEM-ERROR: this message was not
appended, and those before it are kept. Restarts: TRY-AGAIN, and DROP-MESSAGE, which answers nil."
  (with-octets-at (sap size) (octets start end)
    (append-sap appenders sap size)))

(defun writer-of (handle)
  "What room is reserved by, if it is HANDLE that is asked for room; nil by DROP-MESSAGE."
  (etypecase handle
    (sender handle)
    (appenders (or (own-appender handle)
                   (persisting (:what "append")
                     (with-cause (join handle) handle))))))

;;; ---- Flushing

(defun flush (handle)
  "Has the sink take what APPENDERS or a FLUSHING have. Of appenders everything whose APPEND-MESSAGE had returned before, in any thread, is there
when this returns, and any thread may do it at any time. Waits as long as the sink takes. Answers true, or, of a flushing, nil when there
are no more senders. Signals SINK-ERROR and what else the sink may; then all of it is kept, and comes again."
  (declare (type (or appenders flushing) handle))
  (let ((result (with-cause (attempt (%flush-now (handle-address handle))) handle)))
    (unless (and (typep result 'closed-error) (typep handle 'flushing))
      (check result)
      (when (typep handle 'appenders)
        (without-interrupts
          (sb-thread:with-mutex ((appenders-lock handle))
            (reap (appenders-places handle)))))
      t)))

(defun open-flush (receiver sink &key (flush-bytes (ash 1 20)) (flush-interval 1/10))
  "Has what RECEIVER receives handed to SINK, a bufferful of :FLUSH-BYTES at a time, or :FLUSH-INTERVAL seconds after it came, nil: not by time,
as long as RUN-FLUSH runs: see OPEN-APPENDERS for sinks. What the sink has taken is released. The receiver is closed as a handle, and
goes on as part of the flushing; if this fails it is as before. Does not wait. Signals as OPEN-APPENDERS."
  (declare (type receiver receiver))
  (check-type flush-interval (or null (real (0))))
  (let ((made (when (functionp sink) (make-sink :function sink))) (number nil))
    (flet ((make (&key address)
             (take-address receiver)
             (%make-flushing :address address :sink made
                             :shut (let ((number number))
                                     (lambda (address)
                                       (prog1 (attempt (%close address))
                                         (when number (remhash number *sinks*))))))))
      (call-with-sink (lambda (sap)
                        (when made (setf number (sap-ref-64 sap 16)))
                        (with-options (options (list :flush-bytes flush-bytes :flush-interval flush-interval))
                          (opening (out make) (%flush-open (handle-address receiver) options sap out))))
                      sink made))))

(defmacro with-flush ((flushing receiver sink &rest options) &body body)
  "Runs BODY with a FLUSHING: see OPEN-FLUSH. It is closed however BODY is left."
  `(with-handle (,flushing (open-flush ,receiver ,sink ,@options)) ,@body))

(defun run-flush (flushing &key timeout)
  "Flushes until there are no more senders, and then has all of it synced and answers true; or until TIMEOUT seconds have passed, nil for ever,
and answers nil. Interrupts are looked at 20 times a second. Signals SINK-ERROR and what else the sink may, with the restart TRY-AGAIN; else as
RECEIVE; it can be called again."
  (declare (type flushing flushing))
  (loop
    (let ((result (attempt-waiting ((handle-address flushing) nil timeout deadline :arm nil)
                    (%flush-run (handle-address flushing) deadline))))
      (cond ((eql result 0) (return t))
            ((eql result +again+) (return nil)))
      (restart-case (error (with-cause result flushing))
        (try-again () :report "Go on.")))))

;;; ---- Record files

(define-handle records ()
  "A record file that is read.")

(defun open-records (path)
  (check (opening (out %make-records) (%records-open (native path) out))))

(defun map-record-file (function path)
  "Calls FUNCTION with each message of a record file, a fresh vector of its bytes, and its number, in the order in which they were written. Nothing
is given out that has not been checked. Answers :END, or :TORN where the end is not whole, as a killed writer leaves it, or one that is
writing just now. Signals DAMAGED-ERROR in the middle of a damaged file, with the restart SKIP-DAMAGE, which goes on behind that;
NOT-A-RECORD-FILE-ERROR, SYSTEM-ERROR."
  (let ((function (coerce function 'function)))
    (with-handle (records (open-records path))
      (with-words (record 6)
        (loop
          (let ((result (attempt (%records-next (handle-address records) record))))
            (typecase result
              ((eql 0) (funcall function
                                (sap-octets (sap-ref-sap record 0) (ldb (byte 62 0) (sap-ref-64 record 8)))
                                (sap-ref-32 record 32)))
              ((eql #.+again+) (return :end))
              (torn-error (return :torn))
              (damaged-error (restart-case (error result)
                               (skip-damage () :report "Go on behind it.")))
              (t (error result)))))))))
