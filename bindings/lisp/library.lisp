;;;; The library behind all this: where it is, its codes as conditions, its functions, and how they are called.
;;;;
;;;; Interrupts: a thread that is interrupted in a foreign function, and unwinds from there, would leave pelton in the middle of what it
;;;; was doing, perhaps with a lock. So every call is made without interrupts, none of them for longer than SLICE-NS, and who waits
;;;; longer sleeps in poll(2), with interrupts. What a call has changed is noted before interrupts are looked at again.

(in-package #:pelton)

;;; ---- Bytes

(deftype octets () "What a message is: a simple vector of bytes." '(simple-array (unsigned-byte 8) (*)))

(declaim (inline make-octets))
(defun make-octets (size)
  "A vector of SIZE bytes, whatever they are."
  (make-array size :element-type '(unsigned-byte 8)))

(defun sap-octets (sap size)
  "A copy of SIZE bytes at SAP, made once: who looks at the copy alone trusts nobody."
  (declare (type system-area-pointer sap) (type (unsigned-byte 62) size))
  (let ((octets (if (< size (ash 1 20)) (make-octets size) (make-large-octets size))))
    (with-pinned-objects (octets)
      (sb-kernel:system-area-ub8-copy sap 0 (vector-sap octets) 0 size))
    octets))

(defun array-data (vector start end)
  "The simple vector that has the bytes of VECTOR from START to END, and where in it they begin and end."
  (check-type vector (vector (unsigned-byte 8)))
  (sb-kernel:with-array-data ((data vector) (from start) (to end) :check-fill-pointer t)
    (values data from to)))

(defmacro with-octets-at ((sap size) (octets start end) &body body)
  "Runs BODY where the bytes of OCTETS, a vector of bytes, from START to END, nil for its end, are at SAP, and stay there."
  (let ((vector (gensym "VECTOR")) (data (gensym "DATA")) (from (gensym "FROM")) (to (gensym "TO")))
    `(let ((,vector ,octets) (,from ,start) (,to ,end))
       (multiple-value-bind (,data ,from ,to)
           (if (and (typep ,vector 'octets)
                    (typep ,from 'fixnum)
                    (typep ,to '(or null fixnum))
                    (<= 0 ,from (or ,to (length ,vector)) (length ,vector)))
               (values ,vector ,from (or ,to (length ,vector)))
               (array-data ,vector ,from ,to))
         (declare (type octets ,data) (type (unsigned-byte 62) ,from ,to))
         (with-pinned-objects (,data)
           (let ((,sap (sap+ (vector-sap ,data) ,from)) (,size (- ,to ,from)))
             (declare (type system-area-pointer ,sap) (type (unsigned-byte 62) ,size))
             ,@body))))))

;;; ---- The library

(eval-when (:compile-toplevel :load-toplevel :execute)
  (defparameter *checkout*
    #.(truename (merge-pathnames "../../" (make-pathname :name nil :type nil :version nil
                                                         :defaults (or *compile-file-truename* *load-truename*))))
    "Where pelton was, together with this file, when it was compiled.")

  (defun library-path ()
    "The library: as PELTON_LIBRARY in the environment says, else what was built beside these sources, else the installed one."
    (let ((named (environment "PELTON_LIBRARY"))
          (built (merge-pathnames "target/release/libpelton_capi.so" *checkout*)))
      (cond (named)
            ((probe-file built) (sb-ext:native-namestring built))
            (t "libpelton.so.0"))))

  (defun environment (name)
    (let ((value (sb-ext:posix-getenv name)))
      (and value (plusp (length value)) value)))

  (defun load-library ()
    ;; Not saved with an image, which looks for it anew when it starts.
    (handler-case (sb-alien:load-shared-object (library-path) :dont-save t)
      (error (condition)
        (error "~a~%Install it, `./run install` in pelton's sources, or say in PELTON_LIBRARY where it is." condition))))

  (load-library))

;;; ---- The codes, read from pelton.h

(eval-when (:compile-toplevel :load-toplevel :execute)
  (defun header-path ()
    "pelton.h: as PELTON_HEADER in the environment says, else the one of these sources, else an installed one."
    (or (environment "PELTON_HEADER")
        (find-if #'probe-file (list (merge-pathnames "include/pelton.h" *checkout*)
                                    "/usr/local/include/pelton.h" "/usr/include/pelton.h"))
        (error "pelton.h is in none of the usual places: say where in PELTON_HEADER")))

  (defun read-codes ()
    "The lines X(PELTON_NAME, number, \"text\") of the header: a list of (NAME number text), where NAME is a string without PELTON_."
    (with-open-file (header (header-path) :external-format :utf-8)
      (loop for line = (read-line header nil)
            for start = (and line (search "X(PELTON_" line))
            while line
            when (and start (search "\")" line))
              collect (let* ((comma (position #\, line :start start))
                             (number (parse-integer line :start (1+ comma) :junk-allowed t))
                             (quote (position #\" line)))
                        (list (substitute #\- #\_ (subseq line (+ start (length "X(PELTON_")) comma))
                              number
                              (subseq line (1+ quote) (position #\" line :from-end t)))))))

  (defun header-version ()
    "The header's major and minor number."
    (with-open-file (header (header-path) :external-format :utf-8)
      (loop with numbers = '()
            for line = (read-line header nil)
            while line
            do (dolist (part '("MAJOR" "MINOR"))
                 (let ((start (format nil "#define PELTON_VERSION_~a " part)))
                   (when (eql (search start line) 0)
                     (push (parse-integer line :start (length start)) numbers))))
            finally (return (nreverse numbers))))))

(define-condition pelton-error (error)
  ((code :initarg :code :reader pelton-error-code :documentation "The library's number for it, below 0.")
   (detail :initarg :detail :initform "" :reader pelton-error-detail
           :documentation "What was found, what was wanted, and what to do, if the library says so."))
  (:documentation "Whatever pelton tells that is no answer. For each code of pelton.h there is a condition below it, named after the code:
PEER-DIED-ERROR of PELTON_PEER_DIED, and so on; TIMED-OUT of PELTON_AGAIN.")
  (:report (lambda (condition stream)
             (format stream "pelton: ~a~@[: ~a~]" (code-text (pelton-error-code condition))
                     (let ((detail (pelton-error-detail condition))) (and (plusp (length detail)) detail))))))

(define-condition channel-ended (pelton-error) ()
  (:documentation "The other side has closed, or died."))

(define-condition mistake (pelton-error) ()
  (:documentation "The caller did what must not be done."))

(defvar *conditions* (make-hash-table) "The name of each code's condition.")

(defmacro define-codes ()
  "For each code a constant, +PEER-DIED+, and a condition, PEER-DIED-ERROR, which package.lisp exports."
  `(progn
     ,@(loop for (name number text) in (read-codes)
             for constant = (intern (format nil "+~a+" name))
             for condition = (intern (if (string= name "AGAIN") "TIMED-OUT" (format nil "~a-ERROR" name)))
             for parent = (cond ((member name '("CLOSED" "PEER-DIED") :test #'string=) 'channel-ended)
                                ((eql (search "mistake of the caller" text) 0) 'mistake)
                                (t 'pelton-error))
             collect `(defconstant ,constant ,number ,text)
             collect `(define-condition ,condition (,parent)
                        ,(cond
                           ((string= name "SYSTEM")
                            '((errno :initarg :errno :initform 0 :reader system-error-errno :documentation "The system's own number.")))
                           ((string= name "SINK")
                            '((cause :initarg :cause :initform nil :reader sink-error-cause
                               :documentation "The condition by which the sink was left, if it is a function of Lisp's."))))
                        (:documentation ,(format nil "PELTON_~a, ~d: ~a." (substitute #\_ #\- name) number text)))
             collect `(setf (gethash ,number *conditions*) ',condition))))

(define-codes)

(defun make-large-octets (size)
  "As MAKE-OCTETS, of a size that somebody else has said: an exhausted heap would end the process."
  (flet ((left () (floor (* 3 (- (sb-ext:dynamic-space-size) (sb-kernel:dynamic-usage))) 4)))
    (when (and (> size (left)) (progn (sb-ext:gc) (> size (left))))
      (error 'too-small-error
             :code +too-small+
             :detail (format nil "~:d bytes have come, and the heap has room for ~:d more: look at them in place, or begin sbcl with a ~
                                  larger --dynamic-space-size" size (left))))
    (make-octets size)))

;;; ---- The library's functions

(deftype word () '(unsigned-byte 64))

(defmacro define-foreign (name c-name result &rest arguments)
  "A function of the library's, as NAME, to be called without interrupts. ARGUMENTS are (name alien-type)."
  `(progn
     (declaim (inline ,name))
     (defun ,name ,(mapcar #'first arguments)
       (alien-funcall (extern-alien ,c-name (function ,result ,@(mapcar #'second arguments)))
                      ,@(mapcar #'first arguments)))))

(defmacro define-foreigns (&body definitions)
  `(progn ,@(loop for (name c-name . arguments) in definitions
                  collect `(define-foreign ,name ,c-name int ,@arguments))))

(define-alien-type utf-8 (c-string :external-format :utf-8))

(define-foreign %version "pelton_version" unsigned-int)
(define-foreign %code-text "pelton_code_text" utf-8 (code int))
(define-foreign %error-detail "pelton_error_detail" utf-8)
(define-foreign %deadline "pelton_deadline" (signed 64) (timeout (signed 64)))

;; Handles are words: a SAP that is not known to stay in a register conses.
(define-foreigns
  (%sender-open "pelton_sender_open" (name utf-8) (options system-area-pointer) (out system-area-pointer))
  (%receiver-open "pelton_receiver_open" (name utf-8) (options system-area-pointer) (out system-area-pointer))
  (%threads "pelton_threads" (options system-area-pointer) (sender system-area-pointer) (receiver system-area-pointer))
  (%gather "pelton_gather" (name utf-8) (options system-area-pointer) (out system-area-pointer))
  (%receiver-senders "pelton_receiver_senders" (receiver (unsigned 64)) (out system-area-pointer))
  (%senders-send "pelton_senders_send" (senders (unsigned 64)) (data system-area-pointer) (size (unsigned 64)) (deadline (signed 64)))
  (%listen "pelton_listen" (name utf-8) (options system-area-pointer) (out system-area-pointer))
  (%accept-sender "pelton_accept_sender" (listener (unsigned 64)) (deadline (signed 64)) (out system-area-pointer))
  (%accept-receiver "pelton_accept_receiver" (listener (unsigned 64)) (deadline (signed 64)) (out system-area-pointer))
  (%fd "pelton_fd" (handle (unsigned 64)))
  (%arm "pelton_arm" (handle (unsigned 64)))
  (%arm-send "pelton_arm_send" (sender (unsigned 64)) (size (unsigned 64)))
  (%disarm "pelton_disarm" (handle (unsigned 64)))
  (%get-info "pelton_get_info" (handle (unsigned 64)) (out system-area-pointer))
  (%resume "pelton_resume" (handle (unsigned 64)) (deadline (signed 64)))
  (%sync "pelton_sync" (handle (unsigned 64)))
  (%drain "pelton_drain" (handle (unsigned 64)) (deadline (signed 64)))
  (%release "pelton_release" (handle (unsigned 64)))
  (%close "pelton_close" (handle (unsigned 64)))
  (%send "pelton_send" (sender (unsigned 64)) (data system-area-pointer) (size (unsigned 64)) (deadline (signed 64)))
  (%trim "pelton_trim" (sender (unsigned 64)))
  (%reserve "pelton_reserve" (handle (unsigned 64)) (size (unsigned 64)) (deadline (signed 64)) (out system-area-pointer))
  (%commit "pelton_commit" (handle (unsigned 64)) (size (unsigned 64)))
  (%abort "pelton_abort" (handle (unsigned 64)))
  (%receive "pelton_receive" (receiver (unsigned 64)) (deadline (signed 64)) (message system-area-pointer))
  (%receive-copy "pelton_receive_copy" (receiver (unsigned 64)) (buffer system-area-pointer) (capacity (unsigned 64))
                 (deadline (signed 64)) (out-size system-area-pointer))
  (%flush-open "pelton_flush_open" (receiver (unsigned 64)) (options system-area-pointer) (sink system-area-pointer)
               (out system-area-pointer))
  (%flush-run "pelton_flush_run" (flush (unsigned 64)) (deadline (signed 64)))
  (%flush-now "pelton_flush_now" (handle (unsigned 64)))
  (%appenders-open "pelton_appenders_open" (options system-area-pointer) (sink system-area-pointer) (out system-area-pointer))
  (%appender-open "pelton_appender_open" (appenders (unsigned 64)) (out system-area-pointer))
  (%append "pelton_append" (appender (unsigned 64)) (data system-area-pointer) (size (unsigned 64)))
  (%records-open "pelton_records_open" (path utf-8) (out system-area-pointer))
  (%records-next "pelton_records_next" (records (unsigned 64)) (record system-area-pointer))
  (%client-open "pelton_client_open" (name utf-8) (options system-area-pointer) (out system-area-pointer))
  (%submit "pelton_submit" (client (unsigned 64)) (data system-area-pointer) (size (unsigned 64)) (flags unsigned-int)
           (deadline (signed 64)) (out-call system-area-pointer))
  (%cancel "pelton_cancel" (client (unsigned 64)) (call (unsigned 64)))
  (%await "pelton_await" (client (unsigned 64)) (call (unsigned 64)) (deadline (signed 64)) (completion system-area-pointer))
  (%service-listen "pelton_service_listen" (name utf-8) (options system-area-pointer) (out system-area-pointer))
  (%service-receive "pelton_service_receive" (service (unsigned 64)) (deadline (signed 64)) (request system-area-pointer))
  (%service-stop "pelton_service_stop" (service (unsigned 64)) (how unsigned-int))
  (%reply "pelton_reply" (responder (unsigned 64)) (data system-area-pointer) (size (unsigned 64)))
  (%reply-fail "pelton_reply_fail" (responder (unsigned 64)) (code unsigned-int) (data system-area-pointer) (size (unsigned 64)))
  (%reply-part "pelton_reply_part" (responder (unsigned 64)) (data system-area-pointer) (size (unsigned 64)) (deadline (signed 64)))
  (%is-cancelled "pelton_responder_is_cancelled" (responder (unsigned 64)))
  (%send-batch "pelton_send_batch" (sender (unsigned 64)) (messages system-area-pointer) (count (unsigned 64)) (deadline (signed 64)))
  (%send-descriptors "pelton_send_descriptors" (sender (unsigned 64)) (data system-area-pointer) (size (unsigned 64))
                     (fds system-area-pointer) (count (unsigned 64)) (deadline (signed 64)))
  (%take-descriptors "pelton_take_descriptors" (receiver (unsigned 64)) (out system-area-pointer) (capacity (unsigned 64))
                     (out-count system-area-pointer))
  (%hold "pelton_hold" (receiver (unsigned 64)) (out system-area-pointer))
  (%engine-open "pelton_engine_open" (options system-area-pointer) (out system-area-pointer))
  (%file-submit "pelton_file_submit" (engine (unsigned 64)) (operations system-area-pointer) (count (unsigned 64))
                (taken system-area-pointer))
  (%file-completions "pelton_file_completions" (engine (unsigned 64)) (deadline (signed 64)) (out system-area-pointer)
                     (count (unsigned 64)) (taken system-area-pointer))
  (%file-cancel "pelton_file_cancel" (engine (unsigned 64)) (token (unsigned 64)))
  (%poll "poll" (fds system-area-pointer) (count (unsigned 64)) (milliseconds int)))

(define-foreign %usleep "usleep" int (microseconds unsigned-int))

(defun code-text (code)
  "The library's words for a code."
  (without-interrupts (%code-text code)))

(defun check-version ()
  (let ((found (without-interrupts (%version))) (wanted '#.(header-version)))
    (multiple-value-bind (major rest) (floor found 1000000)
      (unless (equal (list major (floor rest 1000)) wanted)
        (error "libpelton.so has version ~d.~d, these sources were compiled with the header of ~{~d.~d~}: ~
                install them together, or name the library in PELTON_LIBRARY"
               major (floor rest 1000) wanted)))))

(check-version)

;;; ---- Calling them

(defun failure (code)
  "The condition for CODE, which the calling thread has just been answered."
  (let ((errno (sb-alien:get-errno)) (detail (%error-detail)) (type (gethash code *conditions* 'pelton-error)))
    (if (eql code +system+)
        (make-condition type :code code :errno errno :detail (if (string= detail "") (sb-int:strerror errno) detail))
        (make-condition type :code code :detail detail))))

(defmacro attempt (call)
  "Makes CALL without interrupts. Answers its number, or a condition instead of one below PELTON_AGAIN."
  (let ((code (gensym "CODE")))
    `(without-interrupts
       (let ((,code ,call))
         (declare (type (signed-byte 32) ,code))
         (if (< ,code +again+) (failure ,code) ,code)))))

(defun failure-without-interrupts (code enabled)
  (unwind-protect (failure code)
    (when enabled
      (setf sb-sys:*interrupts-enabled* enabled)
      (when sb-sys:*interrupt-pending* (sb-unix::receive-pending-interrupt)))))

(defmacro briefly (call)
  "As ATTEMPT, of a CALL whose arguments are variables of the right types: nothing of it unwinds, so that nothing need be bound, which is a third
of the time of a message."
  (let ((code (gensym "CODE")) (enabled (gensym "ENABLED")))
    `(let* ((,enabled sb-sys:*interrupts-enabled*)
            (,code (progn (setf sb-sys:*interrupts-enabled* nil) ,call)))
       (declare (type (signed-byte 32) ,code))
       (cond ((< ,code +again+) (failure-without-interrupts ,code ,enabled))
             (t
              (when ,enabled
                (setf sb-sys:*interrupts-enabled* ,enabled)
                (when sb-sys:*interrupt-pending* (sb-unix::receive-pending-interrupt)))
              ,code)))))

(defun check (result)
  "Signals what ATTEMPT has answered, if it is a condition."
  (if (typep result 'condition) (with-interrupts (error result)) result))

(defconstant +no-wait+ 0)
(defconstant +forever+ (1- (expt 2 63)))

(defconstant +slice-ns+ 50000
  "So long a call may wait without interrupts: long enough for all of the library's spinning.")

(defconstant +long-slice-ns+ 50000000
  "So long a call may wait that has no descriptor to be polled for, or whose descriptor does not tell what is waited for.")

(defun deadline-of (timeout)
  (etypecase timeout
    (null +forever+)
    ((real 0 0) +no-wait+)
    ((real 0) (without-interrupts (%deadline (min (ceiling (* timeout 1000000000)) +forever+))))))

(declaim (inline past-p slice-until))
(defun past-p (deadline)
  (declare (type (signed-byte 64) deadline))
  (or (eql deadline +no-wait+)
      (and (/= deadline +forever+) (<= deadline (without-interrupts (%deadline 0))))))

(defun slice-until (deadline slice)
  (declare (type (signed-byte 64) deadline slice))
  (min deadline (without-interrupts (%deadline slice))))

(defun poll-milliseconds (fd milliseconds)
  (with-alien ((poll (unsigned 64)))
    (let ((sap (alien-sap (addr poll))) (pollin 1))
      (setf (sap-ref-32 sap 0) fd
            (sap-ref-32 sap 4) pollin)
      (%poll sap 1 milliseconds))))

(defun readable-p (fd)
  (eql (poll-milliseconds fd 0) 1))

(defun wait-readable (fd deadline)
  "Sleeps, with interrupts, until FD is readable, or DEADLINE, or something interrupts."
  (declare (type (signed-byte 64) deadline))
  (poll-milliseconds fd (if (eql deadline +forever+)
                            -1
                            ;; A longer sleep is begun anew.
                            (max 0 (min 1000000 (ceiling (- deadline (without-interrupts (%deadline 0))) 1000000))))))

(defun wait-for (address spins timeout call arm)
  "Makes CALL, a function of a deadline that answers as ATTEMPT does, until it does not answer PELTON_AGAIN, or TIMEOUT has passed. Between
calls waits by ARM, a function that answers likewise, or, if that is nil, in the call. Interrupts are looked at all the time."
  (declare (type word address) (type function call) (dynamic-extent call arm))
  (let ((deadline (deadline-of timeout)) (slice (if arm +slice-ns+ +long-slice-ns+)))
    (loop
      ;; The library's own way of waiting, for a moment.
      (let ((result (funcall call (slice-until deadline slice))))
        (unless (eql result +again+)
          (return result)))
      (when (past-p deadline)
        (return (funcall call +no-wait+)))
      (when (and arm (not spins))
        (let ((armed 0))
          (without-interrupts
            (unwind-protect
                 (with-local-interrupts
                   (when (eql (setf armed (funcall (the function arm))) +again+)
                     (wait-readable (without-interrupts (%fd address)) deadline)))
              (%disarm address)))
          (unless (typep armed 'fixnum)
            (return armed))
          ;; If something is there, and is not what is waited for, the descriptor tells nothing.
          (setf slice (if (eql armed 0) +long-slice-ns+ +slice-ns+)))))))

(defmacro attempt-waiting ((address spins timeout deadline &key (arm `(%arm ,address)) tried handle) call)
  "As ATTEMPT; waits up to TIMEOUT seconds. CALL is made with DEADLINE bound, and often again. TRIED is a variable for what the call has answered
already: a condition is the answer then, once, for the library may have told it once. Of HANDLE it is remembered that its peer has died, until
somebody is told, by PERSIST, and nil is answered."
  (let ((result (gensym "RESULT")) (seconds (gensym "SECONDS")))
    (flet ((attempt (call) (if handle `(without-interrupts (note ,handle (attempt ,call))) `(attempt ,call))))
      `(let* ((,seconds ,timeout)
              (,result ,(let ((call `(let ((,deadline +no-wait+)) ,(attempt call))))
                          (if tried `(if (typep ,tried 'condition) (shiftf ,tried nil) ,call) call))))
         (if (and (eql ,result +again+) (not (eql ,seconds 0)))
             (flet ((call (,deadline) (declare (type (signed-byte 64) ,deadline)) ,(attempt call))
                    ,@(when arm `((arm () ,(attempt arm)))))
               (declare (dynamic-extent #'call ,@(when arm '(#'arm))))
               (wait-for ,address ,spins ,seconds #'call ,(when arm '#'arm)))
             ,result)))))

(defmacro guarding ((at count) try body cleanup)
  "Does TRY, BODY, and, however these are left, CLEANUP, where AT is the address of COUNT words of 0, at first. BODY alone is interrupted; what is
to be undone is noted in the words, without interrupts. AT is a fixnum, since BODY is a closure, and a SAP in one conses."
  (let ((words (gensym "WORDS")))
    `(without-interrupts
       (with-words (,words ,count)
         (let ((,at (ldb (byte 62 0) (sap-int ,words))))
           (declare (type (unsigned-byte 62) ,at))
           (unwind-protect (progn ,try (with-local-interrupts ,body))
             ,cleanup))))))

(declaim (inline word-at (setf word-at) sap-at))
(defun word-at (at offset)
  (declare (type (unsigned-byte 62) at))
  (sap-ref-64 (int-sap at) offset))

(defun (setf word-at) (word at offset)
  (declare (type (unsigned-byte 62) at) (type word word))
  (setf (sap-ref-64 (int-sap at) offset) word))

(defun sap-at (at offset)
  (declare (type (unsigned-byte 62) at))
  (sap-ref-sap (int-sap at) offset))

;;; ---- What the library is given

(defmacro with-words ((sap count) &body body)
  "Runs BODY with SAP at COUNT words of 0."
  (let ((words (gensym "WORDS")))
    `(with-alien ((,words (array (unsigned 64) ,count)))
       (let ((,sap (alien-sap ,words)))
         ,@(loop for i below count collect `(setf (sap-ref-64 ,sap ,(* 8 i)) 0))
         ,@body))))

(defun native (path)
  "The name of a file for the system: a string as it is, since what means something to Lisp may be in it."
  (if (pathnamep path) (sb-ext:native-namestring path) path))

(defun seconds-to-ns (seconds)
  (min (ceiling (* seconds 1000000000)) +forever+))

(defun call-with-options (function &key (wait :block) capacity message-bytes-max uids create mode lanes announce flush-bytes
                                     (flush-interval nil flush-interval-p) call-bytes-max (hold nil hold-p) threads root resident-max memory)
  "Calls FUNCTION with a SAP at a pelton_options."
  (check-type wait (member :block :spin))
  (let ((uids (coerce uids '(simple-array (unsigned-byte 32) (*))))
        (octets (coerce (sb-ext:string-to-octets (if root (native root) "") :external-format :utf-8 :null-terminate t) 'octets)))
    (with-pinned-objects (uids octets)
      (with-words (sap 16)
        (setf (sap-ref-32 sap 0) 128
              (sap-ref-32 sap 4) (ecase wait (:block 0) (:spin 1))
              (sap-ref-64 sap 8) (or capacity 0)
              (sap-ref-64 sap 16) (or message-bytes-max 0)
              (sap-ref-sap sap 32) (vector-sap uids)
              (sap-ref-32 sap 40) (length uids)
              (sap-ref-32 sap 44) (if create 1 0)
              (sap-ref-32 sap 48) (or mode 0)
              (sap-ref-32 sap 52) (or lanes 0)
              (sap-ref-32 sap 56) (if announce 1 0)
              (sap-ref-64 sap 64) (or flush-bytes 0)
              (signed-sap-ref-64 sap 72) (cond ((not flush-interval-p) 0)
                                               (flush-interval (seconds-to-ns flush-interval))
                                               (t +forever+))
              (sap-ref-64 sap 80) (or call-bytes-max 0)
              (signed-sap-ref-64 sap 88) (cond ((not hold-p) 0)
                                               ((or (null hold) (zerop hold)) -1)
                                               (t (seconds-to-ns hold)))
              (sap-ref-32 sap 100) (or threads 0)
              (sap-ref-64 sap 112) (or resident-max 0)
              (sap-ref-64 sap 120) (or memory 0))
        (when root (setf (sap-ref-sap sap 104) (vector-sap octets)))
        (funcall function sap)))))

(defmacro with-options ((sap options) &body body)
  `(apply #'call-with-options (lambda (,sap) ,@body) ,options))
